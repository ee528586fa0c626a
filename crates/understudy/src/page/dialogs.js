// What can be done to a VM, each with a dialog that says what will happen.

import { call } from "./api.js";

const find = (id) => document.getElementById(id);

function paragraph(text) {
  const made = document.createElement("p");
  made.textContent = text;
  return made;
}

function field(name, text, control) {
  const label = document.createElement("label");
  label.textContent = text;
  label.htmlFor = control.id = `field-${name}`;
  control.name = name;
  return [label, control];
}

function choice(name, text, values) {
  const select = document.createElement("select");
  for (const value of values) {
    select.append(new Option(value, value));
  }
  return field(name, text, select);
}

function line(name, text, placeholder) {
  const input = document.createElement("input");
  input.placeholder = placeholder;
  input.autocomplete = "off";
  return field(name, text, input);
}

const path = (vm, what) => `/v1/vms/${encodeURIComponent(vm.name)}/${what}`;
const fellows = (vm) => (vm.group ? [`All VMs of its group ${vm.group} go with it.`] : []);

/** The actions that make sense for a VM now. */
export function actions(vm, status) {
  if (vm.role !== "primary") {
    return [];
  }
  const { state } = vm.protection;
  const followed = state === "protected" || state === "unheld";
  const some = [];
  if (state === "off" || state === "degraded") {
    some.push(protect(vm, status));
  }
  if (state === "protected") {
    some.push(failOver(vm));
  }
  if (followed || state === "degraded" || state === "syncing") {
    some.push(unprotect(vm));
  }
  some.push(snapshot(vm));
  return some;
}

function protect(vm, status) {
  // What was asked for when it was protected, and its group, are not lost with its protection.
  const wanted = vm.protection.state === "degraded" ? vm.wanted : null;
  const words = [
    "Its memory and disks are copied to the other host while it runs on. From then on nothing that it sends leaves this host before the other one has what led to it: its answers come a few milliseconds later.",
    status.arbiter ? "If this host fails, the other one goes on with it where it stood." : "This host has no arbiter in its configuration, so this will be refused.",
    ...(wanted ? asWanted(wanted) : []),
  ];
  return {
    name: "Protect",
    title: `Protect ${vm.name}?`,
    words,
    fields: () => choice("to", "With host", status.peers),
    go: "Protect it",
    primary: true,
    run: (values) =>
      call("POST", `${path(vm, wanted ? "protect-again" : "protect")}?wait=false`, { to: values.to }).then((job) => followed(job, isCopied)),
    done: `${vm.name} is being copied.`,
  };
}

/** Words on how it is protected again. */
function asWanted({ group, mode, hold_console: holdsConsole }) {
  const how = [mode === "lockstep" ? "in lockstep" : "by checkpoints", ...(holdsConsole ? ["with its console held"] : [])];
  return [`It is protected as it was before: ${how.join(", ")}.`, ...fellows({ group })];
}

function failOver(vm) {
  const { peer } = vm.protection;
  return {
    name: "Fail over",
    title: `Move ${vm.name} to host ${peer}?`,
    words: [
      `It stops here and goes on on host ${peer} where it stood. Nothing is lost, connections live on; clients wait for a fraction of a second.`,
      `It is unprotected until ${peer} has copied it to a backup of its own, which this host may become.`,
      ...fellows(vm),
    ],
    go: `Move it to ${peer}`,
    run: () => call("POST", path(vm, "failover")),
    done: `${vm.name} runs on host ${peer} now.`,
  };
}

function unprotect(vm) {
  const { peer, state } = vm.protection;
  const copy = peer ? `Host ${peer} gives its copy up.` : "Nobody looks for a backup any more.";
  const again = state === "degraded" ? "" : " Protecting it again copies what has changed by then.";
  return {
    name: "Unprotect",
    title: `End the protection of ${vm.name}?`,
    words: [`It runs on here, and is lost with this host if that fails. ${copy}${again}`, ...fellows(vm)],
    go: "End its protection",
    grave: true,
    run: () => call("POST", path(vm, "unprotect")),
    done: `${vm.name} runs on, unprotected.`,
  };
}

function snapshot(vm) {
  const disks = vm.disks.length === 1 ? "its disk" : `its ${vm.disks.length} disks`;
  return {
    name: "Snapshot",
    title: `Take a snapshot of ${vm.name}?`,
    words: [
      `Its memory and ${disks} are saved as they are at one moment. It stands still for some milliseconds, and its disks and the store are busy for a while.`,
    ],
    fields: () => [
      ...line("store", "Store: a directory of this host, or an s3:// address", "the one of its group"),
      ...line("label", "Label, to keep it from being deleted by itself", "none"),
    ],
    go: "Take it",
    run: (values) =>
      call("POST", `${path(vm, "snapshot")}?wait=false`, { store: values.store || null, label: values.label || null }).then((job) => followed(job)),
    done: `The snapshot of ${vm.name} is taken.`,
  };
}

/** Whether a protection is under way: from then on the page shows what becomes of it. */
const isCopied = (job) => job.progress !== null;

/** Waits for a job's end, or until that is enough of it; an error is its error. */
async function followed(job, isEnough = () => false) {
  while (job.state === "running" && !isEnough(job)) {
    await new Promise((done) => setTimeout(done, 500));
    job = await call("GET", `/v1/jobs/${job.id}`);
  }
  if (job.error) {
    throw new Error(job.error.message);
  }
  return job;
}

/** Asks, and does it if that is wanted; gives the words for what came of it, or null. */
export function ask(action) {
  const dialog = find("dialog");
  const form = dialog.querySelector("form");
  const [go, error] = [find("dialog-go"), find("dialog-error")];
  find("dialog-title").textContent = action.title;
  find("dialog-words").replaceChildren(...action.words.map(paragraph));
  find("dialog-fields").replaceChildren(...(action.fields?.() ?? []));
  go.textContent = action.go;
  go.classList.toggle("grave", Boolean(action.grave));
  error.textContent = "";
  return new Promise((settle) => {
    const end = (words) => {
      form.onsubmit = dialog.oncancel = null;
      go.disabled = false;
      dialog.close();
      settle(words);
    };
    dialog.oncancel = () => end(null);
    form.onsubmit = async (event) => {
      event.preventDefault();
      if (event.submitter?.value !== "go") {
        return end(null);
      }
      go.disabled = true;
      error.textContent = "";
      try {
        await action.run(Object.fromEntries(new FormData(form)));
        end(action.done);
      } catch (problem) {
        go.disabled = false;
        error.textContent = problem.message;
      }
    };
    dialog.showModal();
    // Whatever cannot be undone by one more key is not what Enter does.
    (dialog.querySelector("select, input") ?? find("dialog-cancel")).focus();
  });
}
