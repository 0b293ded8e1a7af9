// Streams one reply into a message. Knows no elements.

import { Trouble, ask, events } from "./api.js";

/** Fills `message` and calls `changed` after each piece. Errors are written into the message. */
export async function reply(body, message, signal, changed) {
  message.isWriting = true;
  changed();
  try {
    const answer = await ask("/v1/chat/completions", { method: "POST", body, signal });
    for await (const { event, data } of events(answer)) {
      if (event === "") message.note = data.startsWith("loading") ? data : "waiting";
      else if (data?.error) throw new Trouble(data.error.status ?? 500, data.error.message, data.error);
      else if (data) receive(message, data);
      changed();
    }
  } catch (error) {
    if (error.name === "AbortError") message.isStopped = true;
    else message.error = { status: error.status ?? 0, message: error.message, code: error.code, n_prompt: error.n_prompt, n_ctx: error.n_ctx };
  } finally {
    message.isWriting = false;
    delete message.note;
    changed();
  }
}

function receive(message, chunk) {
  const progress = chunk.prompt_progress;
  if (progress) message.progress = { cached: progress.cache, read: progress.processed - progress.cache, total: progress.total };
  if (chunk.timings) message.timings = chunk.timings;
  if (chunk.model) message.model = chunk.model;
  const choice = chunk.choices?.[0];
  if (!choice) return;
  const { content, reasoning_content: thought, tool_calls: calls } = choice.delta;
  if (content) message.content += content;
  if (thought) message.thinking = (message.thinking ?? "") + thought;
  for (const call of calls ?? []) receiveCall((message.calls ??= []), call);
  if (choice.finish_reason) message.finish = choice.finish_reason;
}

function receiveCall(calls, delta) {
  const call = (calls[delta.index ?? calls.length] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
  if (delta.id) call.id = delta.id;
  if (delta.function?.name) call.function.name = delta.function.name;
  if (delta.function?.arguments) call.function.arguments += delta.function.arguments;
}
