// The page: asks the host every second, and shows what has changed.

import { Refusal, call, follow, signIn, signOut, token } from "./api.js";
import { actions, ask } from "./dialogs.js";
import { draw, node, whenTurned } from "./drawing.js";
import { ago, bytes, clock, frames, ms, pages, standing, summary } from "./words.js";

const INTERVAL = 1000;
const KEPT_EVENTS = 200;
const find = (id) => document.getElementById(id);

let last = null;
let following = false;
const cards = new Map();

/** Sets a text only if it is another one: whoever reads aloud is not interrupted for nothing. */
function say(element, text) {
  if (element.textContent !== text) {
    element.textContent = text;
  }
}

/** The same, with what stands between backticks as code. */
function sayWithCode(place, text) {
  if (place.dataset.of !== text) {
    place.dataset.of = text;
    place.replaceChildren(...text.split("`").map((part, i) => (i % 2 ? element("code", "", part) : part)));
  }
}

function element(tag, kind, ...children) {
  const made = document.createElement(tag);
  made.className = kind;
  made.append(...children);
  return made;
}

function tell(words, bad = false) {
  const outcome = find("outcome");
  outcome.className = bad ? "bad" : "";
  outcome.textContent = words;
  clearTimeout(tell.timer);
  tell.timer = setTimeout(() => { outcome.textContent = ""; }, 8000);
}

// ---- one VM ----------------------------------------------------------------

/** A figure's name, value and small print; nothing hides it. */
function figures(vm) {
  const some = [];
  const add = (name, value, note = "") => some.push([name, value, note]);
  // While somebody follows.
  if (vm.throttle) {
    const epochs = vm.lag_epochs === 1 ? "1 epoch" : `${vm.lag_epochs} epochs`;
    if (vm.uncommitted_ms !== null) {
      add("Exposure now", ms(vm.uncommitted_ms), `age of what the backup has; ${epochs} on the way`);
    }
    add("Held for commit", frames(vm.held_frames), vm.held_console_bytes ? `and ${bytes(vm.held_console_bytes)} of the console` : "");
    const wait = vm.output_wait_ms;
    add("Output delay", wait ? ms(wait.to_release_p50) : "–", wait ? `median; 99 % within ${ms(wait.to_release_p99)}` : "nothing was sent yet");
    if (vm.checkpoints > 0) {
      add("Pause", ms(vm.pause_ms.p50), `median; 99 % within ${ms(vm.pause_ms.p99)}, longest ${ms(vm.pause_ms.max)}`);
    }
    add("Guest writes", `${pages(vm.dirty_pages_per_second)}/s`, "of memory");
    const link = vm.compression?.link_bytes_per_second;
    const percent = Math.min(100, Math.round((100 * vm.bandwidth_bytes_per_second) / (link || 1)));
    const share = link ? `${percent < 1 ? "under 1" : percent} % of what the link carries, ${bytes(link)}/s` : "to the backup";
    add("Link", `${bytes(vm.bandwidth_bytes_per_second)}/s`, share);
    const slowed = vm.throttle.vcpu_percent < 100 ? "slowed down: it writes faster than the link carries" : "not slowed down";
    add("Processors", `${vm.throttle.vcpu_percent} %`, vm.throttle.unavailable ?? slowed);
  }
  if (vm.lockstep) {
    add("Lockstep", ms(vm.lockstep.lag_ms), `behind; log ${vm.lockstep.log_mbit_s.toFixed(1)} Mbit/s`);
  }
  if (vm.paths.length > 0) {
    const up = vm.paths.filter((path) => path.up).length;
    const down = vm.paths.find((path) => path.down_seconds !== null);
    add("Paths", `${up} of ${vm.paths.length}`, down ? `${down.address} is down: ${down.reason ?? "no answer"}` : "up");
  }
  if (vm.role === "backup") {
    add("Committed", `epoch ${vm.epoch}`, "on this host");
  }
  return some;
}

/** Figures are written into the places that there are, so that nothing jumps. */
function showFigures(list, vm) {
  const wanted = figures(vm);
  while (list.children.length > wanted.length) {
    list.lastChild.remove();
  }
  wanted.forEach(([name, value, note], i) => {
    if (!list.children[i]) {
      const small = document.createElement("small");
      list.append(element("div", "", document.createElement("dt"), element("dd", "", element("span", ""), small)));
    }
    const [dt, dd] = list.children[i].children;
    say(dt, name);
    say(dd.children[0], value);
    say(dd.children[1], note);
  });
}

function showSync(place, vm) {
  const { state, done_bytes: done, total_bytes: total, remaining_seconds: left, peer } = vm.protection;
  place.hidden = state !== "syncing" || vm.role !== "primary";
  if (place.hidden) {
    return;
  }
  const [words, bar] = place.children;
  const time = left === null ? "" : `, about ${Math.ceil(left)} s left`;
  say(words, total ? `${bytes(done)} of ${bytes(total)} copied to ${peer}${time}` : `${peer} prepares`);
  bar.setAttribute("aria-label", `Copy of ${vm.name}`);
  [bar.max, bar.value] = [total || 1, done];
}

const PHASES = [
  ["before", "until the failure was noticed"],
  ["arbiter", "arbiter"],
  ["log", "rest of the log"],
  ["activation", "disks"],
  ["restart", "start of the guest"],
];

/** The last take-over as a bar, part by part. */
function showTakeover(place, vm) {
  const one = vm.takeover;
  place.hidden = !one;
  if (!one || place.dataset.of === JSON.stringify(one)) {
    return;
  }
  place.dataset.of = JSON.stringify(one);
  const outage = Math.max(one.outage_ms, one.total_ms);
  // Without a log, what comes between is the disks'.
  const log = one.lag_ms > 0 ? one.log_ms : 0;
  const parts = {
    before: Math.max(0, outage - one.total_ms), arbiter: one.arbiter_ms, log,
    activation: one.activation_ms + one.log_ms - log, restart: one.restart_ms,
  };
  const bar = node("svg", { viewBox: `0 0 ${outage || 1} 1`, preserveAspectRatio: "none", "aria-hidden": "true" });
  const legend = element("ul", "legend");
  let at = 0;
  for (const [kind, words] of PHASES.filter(([kind]) => parts[kind] > 0.05)) {
    bar.append(node("rect", { x: at, y: 0, width: parts[kind], height: 1, class: kind }));
    at += parts[kind];
    const patch = node("svg", { viewBox: "0 0 1 1", "aria-hidden": "true" }, node("rect", { width: 1, height: 1, class: kind }));
    legend.append(element("li", "", patch, `${words} ${ms(parts[kind])}`));
  }
  const how = one.planned ? "It came to this host as planned" : "This host took it over";
  const words = `${how}: clients waited ${ms(outage)} at most. ${frames(one.injected_frames)} of theirs went to the guest again, ${frames(one.resent_frames)} of its own left again.`;
  place.replaceChildren(element("p", "", words), bar, legend);
}

function makeCard(name) {
  const title = element("h3", "");
  title.id = `vm-${name}`;
  const card = element("article", "vm", element("header", "", title, element("span", "badge"), element("span", "since")));
  card.setAttribute("aria-labelledby", title.id);
  const bar = document.createElement("progress");
  card.append(
    element("p", "why"), element("div", "sync", element("p", ""), bar), element("dl", "figures"),
    element("div", "takeover"), element("div", "actions"),
  );
  title.textContent = name;
  return card;
}

function showCard(card, vm, status) {
  const { tone, badge, why } = standing(vm);
  const part = (kind) => card.querySelector(`.${kind}`);
  part("badge").className = `badge ${tone}`;
  say(part("badge"), badge);
  say(part("since"), vm.since_ms ? `since ${clock(vm.since_ms)} (${ago(vm.since_ms)})` : "");
  sayWithCode(part("why"), why);
  showSync(part("sync"), vm);
  showFigures(part("figures"), vm);
  showTakeover(part("takeover"), vm);
  showActions(part("actions"), vm, status);
}

/** Buttons stay the same while they mean the same, and keep the focus. */
function showActions(place, vm, status) {
  const wanted = actions(vm, status);
  const meaning = JSON.stringify(wanted.map((action) => [action.name, action.title, action.words]));
  place.hidden = wanted.length === 0;
  if (place.dataset.of === meaning) {
    return;
  }
  place.dataset.of = meaning;
  place.replaceChildren(...wanted.map((action) => {
    const button = element("button", action.primary ? "primary" : "", action.name);
    button.type = "button";
    button.setAttribute("aria-label", `${action.name} ${vm.name}`);
    button.onclick = async () => {
      const words = await ask(action);
      if (words) {
        tell(words);
        refresh();
      }
    };
    return button;
  }));
}

// ---- everything ------------------------------------------------------------

function show(status) {
  last = status;
  find("login").hidden = true;
  find("content").hidden = false;
  find("sign-out").hidden = token() === null;
  say(find("host"), `host ${status.name}`);
  document.title = `${status.name} – Understudy`;
  say(find("summary"), summary(status));
  const awaited = status.awaited.map((vm) => `${vm.name} is to come up here: ${vm.reason}`);
  showProblems(find("problems"), [...status.problems, ...awaited]);
  draw(find("drawing"), status);
  find("no-vms").hidden = status.vms.length > 0;
  const here = new Set(status.vms.map((vm) => vm.name));
  for (const [name, card] of cards) {
    if (!here.has(name)) {
      card.remove();
      cards.delete(name);
    }
  }
  for (const vm of status.vms) {
    if (!cards.has(vm.name)) {
      cards.set(vm.name, makeCard(vm.name));
      find("vms").append(cards.get(vm.name));
    }
    showCard(cards.get(vm.name), vm, status);
  }
}

function showProblems(place, problems) {
  if (place.dataset.of !== problems.join()) {
    place.dataset.of = problems.join();
    place.replaceChildren(...problems.map((problem) => {
      const made = element("p", "problem");
      sayWithCode(made, problem);
      return made;
    }));
  }
}

function addEvent(event) {
  const list = find("events");
  const time = element("time", "", clock(event.at_ms));
  time.dateTime = new Date(event.at_ms).toISOString();
  time.title = new Date(event.at_ms).toLocaleString();
  const grave = event.severity === "info" ? "" : `${event.severity}: `;
  const text = element("span", "text");
  sayWithCode(text, grave + event.text);
  list.prepend(element("li", event.severity, time, element("span", "about", event.vm ?? "host"), text));
  while (list.children.length > KEPT_EVENTS) {
    list.lastChild.remove();
  }
  find("no-events").hidden = true;
  if (last) {
    refresh();
  }
}

function contact(kind, words) {
  document.querySelector("#contact .dot").className = `dot ${kind}`;
  say(find("contact-words"), words);
}

function showLogin(words) {
  last = null;
  find("content").hidden = true;
  find("sign-out").hidden = true;
  say(find("summary"), "");
  contact("", "signed out");
  if (find("login").hidden) {
    find("login").hidden = false;
    find("token").focus();
  }
  say(find("login-error"), token() ? words : "");
  signOut();
}

async function refresh() {
  try {
    show(await call("GET", "/v1/status"));
    contact("live", `as of ${clock(Date.now())}`);
    if (!following) {
      following = true;
      follow(addEvent).finally(() => { following = false; });
    }
  } catch (error) {
    if (error instanceof Refusal && (error.status === 401 || error.status === 403)) {
      return showLogin(error.message);
    }
    contact("lost", error instanceof Refusal ? error.message : "the host does not answer; it is asked again");
  }
}

find("login-form").onsubmit = (event) => {
  event.preventDefault();
  signIn(find("token").value.trim());
  find("token").value = "";
  refresh();
};
find("sign-out").onclick = () => {
  signOut();
  location.reload();
};

async function run() {
  for (;;) {
    if (find("login").hidden) {
      await refresh();
    }
    await new Promise((done) => setTimeout(done, INTERVAL));
  }
}

// A phone that is turned.
whenTurned(() => last && draw(find("drawing"), last));
run();
