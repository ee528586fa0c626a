// Figures and states in words.

const PAGE = 4096;

export function ms(value) {
  if (value === null || value === undefined) {
    return "–";
  }
  if (value >= 10_000) {
    return `${(value / 1000).toFixed(1)} s`;
  }
  return value >= 100 ? `${value.toFixed(0)} ms` : `${value.toFixed(1)} ms`;
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${value < 10 && unit > 0 ? value.toFixed(1) : value.toFixed(0)} ${units[unit]}`;
}

export const pages = (count) => bytes(count * PAGE);

export const frames = (count) => `${count} ${count === 1 ? "frame" : "frames"}`;

export const clock = (at) => new Date(at).toLocaleTimeString([], { hour12: false });

/** How long ago, roughly: nobody needs the seconds of yesterday. */
export function ago(at, now = Date.now()) {
  const seconds = Math.max(0, Math.round((now - at) / 1000));
  if (seconds < 120) {
    return `${seconds} s`;
  }
  if (seconds < 7200) {
    return `${Math.round(seconds / 60)} min`;
  }
  return seconds < 172_800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86_400)} days`;
}

const group = (vm) => (vm.group ? ` with its group ${vm.group}` : "");

/** What a VM is now: a tone, a word or two, and a sentence that says why. */
export function standing(vm) {
  const { state, peer, reason } = vm.protection;
  if (vm.disk_error) {
    return { tone: "bad", badge: "Stands still", why: vm.disk_error };
  }
  if (vm.role === "fenced") {
    return { tone: "bad", badge: "Halted here", why: reason };
  }
  if (vm.role === "backup") {
    return backup(vm);
  }
  switch (state) {
    case "protected":
      return {
        tone: "good",
        badge: "Protected",
        why: `Runs here${group(vm)}; host ${peer} stands by, and nothing leaves this host before ${peer} has what led to it.`,
      };
    case "syncing":
      return {
        tone: "busy",
        badge: "Being copied",
        why: `Runs here; its memory and disks are being copied to host ${peer}. It is not protected until that is done.`,
      };
    case "unheld":
      return {
        tone: "watch",
        badge: "Not protected",
        why: `Host ${peer} follows, but output does not wait for it, as asked for: a fail-over would undo what clients have seen.`,
      };
    case "degraded":
      return { tone: "bad", badge: "Not protected", why: `Runs here alone: ${reason}.` };
    default:
      return { tone: "idle", badge: "Unprotected", why: "Runs here, and nobody asked for its protection." };
  }
}

function backup(vm) {
  const { state, peer, reason } = vm.protection;
  switch (state) {
    case "protected":
      return { tone: "good", badge: "Stands by", why: `Runs on host ${peer}; this host would go on with it.` };
    case "syncing":
      return { tone: "busy", badge: "Being copied", why: `Runs on host ${peer}, which is copying it here.` };
    case "unheld":
      return { tone: "watch", badge: "Follows", why: `Runs on host ${peer}, whose output does not wait for this host.` };
    default:
      return { tone: "bad", badge: "Could not take over", why: `This host backs it up: ${reason}.` };
  }
}

/** All VMs in one sentence. */
export function summary(status) {
  const here = status.vms.filter((vm) => vm.role === "primary");
  const tones = here.map((vm) => standing(vm).tone);
  const count = (tone) => tones.filter((other) => other === tone).length;
  const many = here.length === 0 ? "No VM runs" : here.length === 1 ? "1 VM runs" : `${here.length} VMs run`;
  const parts = [`${many} here`];
  const add = (tone, words) => count(tone) > 0 && parts.push(`${count(tone)} ${words}`);
  add("good", "protected");
  add("busy", "being copied");
  add("bad", count("bad") === 1 ? "needs attention" : "need attention");
  add("watch", "followed without protection");
  const behind = status.vms.filter((vm) => vm.role === "backup").length;
  if (behind > 0) {
    parts.push(`${behind} backed up here`);
  }
  return parts.join(", ");
}
