// Who protects whom: hosts as boxes, VMs in them, the arbiter above, arrows from a VM to its understudy.

import { standing } from "./words.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 250;
const PILL = 36;
const NARROW = matchMedia("(max-width: 40rem)");

/** Calls when there is much less, or more, room than before. */
export const whenTurned = (act) => NARROW.addEventListener("change", act);

export function node(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) {
    made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

const label = (x, y, text, kind = "", anchor = "middle") =>
  node("text", { x, y, class: kind, "text-anchor": anchor }, text);

const short = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

/** Where everything stands: host by host, which VMs it runs or backs up, and whether this host hears it. */
function cast(status) {
  const hosts = new Map([[status.name, { name: status.name, here: true, heard: true, vms: [] }]]);
  const host = (name) => {
    if (!hosts.has(name)) {
      hosts.set(name, { name, here: false, heard: false, vms: [] });
    }
    return hosts.get(name);
  };
  status.peers.forEach(host);
  const arrows = [];
  for (const vm of status.vms) {
    const { tone } = standing(vm);
    const { peer, state } = vm.protection;
    const runs = vm.role === "primary";
    host(status.name).vms.push({ vm: vm.name, tone, understudy: !runs });
    if (peer) {
      host(peer).vms.push({ vm: vm.name, tone, understudy: runs });
      host(peer).heard ||= state !== "off";
      const [from, to] = runs ? [status.name, peer] : [peer, status.name];
      arrows.push({ vm: vm.name, from, to, tone, flows: state !== "off", paths: vm.paths });
    }
  }
  return { hosts: [...hosts.values()], arrows };
}

function place(hosts, narrow, top) {
  const rows = Math.max(1, ...hosts.map((host) => host.vms.length));
  const height = 44 + rows * (PILL + 8) + 6;
  const gap = narrow ? 56 : 170;
  hosts.forEach((host, i) => {
    host.x = narrow ? 20 : 20 + i * (WIDTH + gap);
    host.y = narrow ? top + i * (height + gap) : top;
    host.height = height;
    host.vms.forEach((one, row) => {
      [one.x, one.y] = [host.x + 14, host.y + 40 + row * (PILL + 8)];
    });
  });
  const last = hosts[hosts.length - 1];
  return { width: last.x + WIDTH + (narrow ? 90 : 20), height: last.y + height + 14 };
}

function box(host) {
  const drawn = node("g", {});
  const kind = host.here ? "box here" : host.heard ? "box" : "box unheard";
  drawn.append(
    node("rect", { x: host.x, y: host.y, width: WIDTH, height: host.height, rx: 12, class: kind }),
    label(host.x + 16, host.y + 26, short(host.name, 20), "strong", "start"),
  );
  const note = host.here ? "this host" : host.heard ? "" : "not connected";
  drawn.append(label(host.x + WIDTH - 16, host.y + 26, note, "soft", "end"));
  for (const one of host.vms) {
    const kind = one.understudy ? `pill understudy ${one.tone}` : `pill ${one.tone}`;
    drawn.append(
      node("rect", { x: one.x, y: one.y, width: WIDTH - 28, height: PILL, rx: PILL / 2, class: kind }),
      label(one.x + 18, one.y + 23, short(one.vm, 16), one.understudy ? "" : "strong", "start"),
      label(one.x + WIDTH - 46, one.y + 22, one.understudy ? "understudy" : "runs", "soft", "end"),
    );
  }
  return drawn;
}

function arrow(one, hosts, narrow) {
  const seat = (name) => {
    const host = hosts.find((other) => other.name === name);
    return host?.vms.find((other) => other.vm === one.vm);
  };
  const [from, to] = [seat(one.from), seat(one.to)];
  if (!from || !to) {
    return [];
  }
  const pill = WIDTH - 28;
  const right = to.x > from.x;
  const start = [from.x + (right || narrow ? pill : 0), from.y + PILL / 2];
  const end = [to.x + (right && !narrow ? 0 : narrow ? pill : pill), to.y + PILL / 2];
  const bend = narrow ? 80 : 70;
  const [turn, back] = narrow ? [bend, bend] : right ? [bend, -bend] : [-bend, bend];
  const tip = narrow || !right ? 9 : -9;
  const path = `M${start} C${start[0] + turn},${start[1]} ${end[0] + back},${end[1]} ${end[0] + tip},${end[1]}`;
  const head = `M${end} l${tip},-6 l0,12 z`;
  const flow = one.flows ? "flow" : "";
  const drawn = [
    node("path", { d: path, class: `link ${one.tone} ${flow}` }),
    node("path", { d: head, class: `head ${one.tone}` }),
  ];
  if (one.paths.length > 1 && !narrow) {
    const up = one.paths.filter((path) => path.up).length;
    const middle = [(start[0] + end[0]) / 2, (start[1] + end[1]) / 2 - 9];
    drawn.push(label(...middle, `${up} of ${one.paths.length} paths`, "soft"));
  }
  return drawn;
}

function arbiter(status, hosts, width, narrow) {
  const one = status.arbiter;
  if (!one) {
    return [label(narrow ? 20 : width / 2, 26, "no arbiter: nothing can be protected", "soft", narrow ? "start" : "middle")];
  }
  const x = narrow ? 20 + WIDTH / 2 : width / 2;
  const tone = one.problem ? "bad" : "good";
  const lines = hosts.filter((host) => !narrow || host.here).map((host) => {
    const known = host.here ? `${tone} ${one.problem ? "broken" : ""}` : "";
    return node("path", { d: `M${x},44 L${host.x + WIDTH / 2},${host.y}`, class: `link ${known}`, "stroke-opacity": host.here ? 1 : 0.35 });
  });
  return [
    ...lines,
    node("rect", { x: x - 90, y: 8, width: 180, height: PILL, rx: 8, class: `pill ${tone}` }),
    label(x, 31, one.problem ? `arbiter (${one.kind}): lost` : `arbiter (${one.kind})`),
  ];
}

/** The drawing as a sentence or two, for whoever does not see it. */
function described({ hosts, arrows }, status) {
  const seats = hosts.flatMap((host) => host.vms.filter((one) => !one.understudy).map((one) => `${one.vm} runs on ${host.name}`));
  const stands = arrows.map((one) => `${one.to} ${one.tone === "good" ? "stands by" : "follows"} for ${one.vm}`);
  const unheard = hosts.filter((host) => !host.heard).map((host) => `${host.name} is not connected to this host`);
  const reached = status.arbiter ? `the arbiter is ${status.arbiter.problem ? "not " : ""}reached` : "there is no arbiter";
  return [...seats, ...stands, ...unheard, reached].join("; ");
}

let drawn = "";

/** Draws the status anew, if it looks different. */
export function draw(figure, status) {
  const all = cast(status);
  const narrow = NARROW.matches;
  const seen = JSON.stringify([all, status.arbiter, narrow]);
  if (seen === drawn) {
    return;
  }
  drawn = seen;
  const { width, height } = place(all.hosts, narrow, 84);
  const text = described(all, status);
  const shape = narrow ? "narrow" : "wide";
  const svg = node("svg", { class: shape, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": text });
  svg.append(node("title", {}, text), ...arbiter(status, all.hosts, width, narrow));
  all.hosts.forEach((host) => svg.append(box(host)));
  all.arrows.forEach((one) => svg.append(...arrow(one, all.hosts, narrow)));
  figure.replaceChildren(svg);
}
