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
  const isSent = method === "POST" || body !== undefined;
  if (isSent) headers["Content-Type"] = "application/json";
  let answer;
  try {
    const data = isSent ? JSON.stringify(body ?? {}) : undefined;
    answer = await fetch(path, { method, headers, body: data, signal, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    watchForReturn();
    throw new Trouble(0, "the server cannot be reached");
  }
  if (answer.ok) return answer;
  const problem = await answer.json().catch(() => ({}));
  if (answer.status === 401) notify("locked");
  const said = typeof problem.error === "string" ? problem.error : problem.error?.message; // Ollama's routes answer with a string
  throw new Trouble(answer.status, said ?? `the server answered ${answer.status}`, problem.error);
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
  for await (const frame of pieces(answer, "\n\n")) yield parsed(frame);
}

/** The lines of an answer, each parsed. */
export async function* lines(answer) {
  for await (const line of pieces(answer, "\n")) if (line) yield JSON.parse(line);
}

async function* pieces(answer, between) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest += value;
      const whole = rest.split(between);
      rest = whole.pop();
      yield* whole;
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
