// Requests to the server: the key, errors, and event streams. Knows no elements.

const KEY = "everwarm.key";

export class Trouble extends Error {
  constructor(status, message, more = {}) {
    super(message);
    this.status = status; // 0: no answer
    this.code = more.code ?? "";
    this.n_prompt = more.n_prompt_tokens;
    this.n_ctx = more.n_ctx;
  }
}

/** Dispatches `locked` (a key is required), `lost` (the server does not answer) and `found`. */
export const link = new EventTarget();

const notify = (name) => link.dispatchEvent(new Event(name));

export function setKey(key) {
  try { sessionStorage.setItem(KEY, key); } catch { /* a browser without storage asks for the key again */ }
  kept = key;
}

let kept = (() => { try { return sessionStorage.getItem(KEY) ?? ""; } catch { return ""; } })();

export async function ask(path, { method = "GET", body, signal } = {}) {
  const headers = kept ? { Authorization: `Bearer ${kept}` } : {};
  if (method === "POST") headers["Content-Type"] = "application/json";
  let answer;
  try {
    const data = method === "POST" ? JSON.stringify(body ?? {}) : undefined;
    answer = await fetch(path, { method, headers, body: data, signal, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    watchForReturn();
    throw new Trouble(0, "the server cannot be reached");
  }
  if (answer.ok) return answer;
  const problem = await answer.json().catch(() => ({}));
  if (answer.status === 401) notify("locked");
  throw new Trouble(answer.status, problem.error?.message ?? `the server answered ${answer.status}`, problem.error);
}

export const json = async (path, options) => (await ask(path, options)).json();

let isWatching = false;

async function watchForReturn() {
  if (isWatching) return;
  isWatching = true;
  notify("lost");
  for (let wait_ms = 500; ; wait_ms = Math.min(8000, wait_ms * 1.6)) {
    await pause(wait_ms);
    const answer = await fetch("/health", { cache: "no-store", credentials: "omit" }).catch(() => null);
    if (answer?.ok) break;
  }
  isWatching = false;
  notify("found");
}

export const pause = (ms) => new Promise((done) => setTimeout(done, ms));

/** Server-sent events of an answer: `{event, data}` with data parsed; comments as `{event: ""}`. */
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest += value;
      const frames = rest.split("\n\n");
      rest = frames.pop();
      for (const frame of frames) yield parsed(frame);
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Trouble(0, "the connection broke off");
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parsed(frame) {
  let event = "message";
  const data = [];
  for (const line of frame.split("\n")) {
    if (line.startsWith(":")) return { event: "", data: line.slice(1).trim() };
    if (line.startsWith("event: ")) event = line.slice(7);
    if (line.startsWith("data: ")) data.push(line.slice(6));
  }
  const text = data.join("\n");
  return { event, data: text === "[DONE]" ? null : JSON.parse(text) };
}
