// The host's API, from the page's side.

const KEY = "understudy-token";

/** An answer that is an error: what is wrong, and what to do. */
export class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const token = () => sessionStorage.getItem(KEY);
export const signIn = (text) => sessionStorage.setItem(KEY, text);
export const signOut = () => sessionStorage.removeItem(KEY);

const headers = (more) => {
  const known = token();
  return { ...more, ...(known ? { authorization: `Bearer ${known}` } : {}) };
};

/** Calls the host; gives the answer's JSON, or null if it has none. */
export async function call(method, path, body) {
  const sent = body === undefined ? {} : { body: JSON.stringify(body) };
  const answer = await fetch(path, {
    method,
    headers: headers(body === undefined ? {} : { "content-type": "application/json" }),
    cache: "no-store",
    ...sent,
  });
  const text = await answer.text();
  const json = text === "" ? null : JSON.parse(text);
  if (!answer.ok) {
    throw new Refusal(answer.status, json?.error?.message ?? `the host answered ${answer.status}`);
  }
  return json;
}

/** Gives every event to `take` as it happens, for ever; `EventSource` could send no token. */
export async function follow(take) {
  let after = 0;
  for (;;) {
    try {
      const answer = await fetch(`/v1/events/stream?after=${after}`, { headers: headers({}) });
      if (!answer.ok) {
        throw new Refusal(answer.status, "no events");
      }
      for await (const event of events(answer.body)) {
        after = event.number;
        take(event);
      }
    } catch (error) {
      if (error instanceof Refusal && (error.status === 401 || error.status === 403)) {
        return;
      }
    }
    // The daemon ended, or cannot be reached.
    await new Promise((done) => setTimeout(done, 1000));
  }
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) {
      return;
    }
    rest += value;
    const parts = rest.split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").find((line) => line.startsWith("data: {\""));
      if (data) {
        yield JSON.parse(data.slice("data: ".length));
      }
    }
  }
}
