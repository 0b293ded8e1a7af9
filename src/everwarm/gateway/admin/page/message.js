// One message as elements: its text, thinking and tool calls, its branches, its actions, and its cost.

import { button, h } from "./dom.js";
import { markdown } from "./markdown.js";
import { phasesOf, reuseBar, whyCard } from "./parts.js";
import { copyButton, rendered } from "./render.js";
import { siblings } from "./talk.js";
import { count, counterfactual, duration, trouble } from "./words.js";

const LONG_CHARS = 1200; // of a user's message, from which on it scrolls in its own box

/** `acts`: choose, edit, regenerate, branch, retry. */
export function messageElement(talk, message, acts, isBusy) {
  const element = h("article", { class: `message ${message.role}`, "data-id": message.id, "aria-label": who(message) });
  element.append(head(talk, message, acts, isBusy), body(message));
  return element;
}

/** Updates only what changes while a reply is written; what is folded or open stays so. */
export function refresh(element, message) {
  const fresh = body(message);
  for (const name of ["details.thinking", "details.turn"]) {
    const [before, now] = [element.querySelector(name), fresh.querySelector(name)];
    if (before && now) now.open = before.open;
  }
  element.querySelector(".body").replaceWith(fresh);
}

const who = (message) => ({ user: "You", tool: `Result of ${message.name}` }[message.role] ?? message.model ?? "Model");

function head(talk, message, acts, isBusy) {
  const act = (words, title, listener) => button(words, { class: "plain", title, disabled: isBusy }, listener);
  const actions = [act("Edit", "Edit; the old one stays as a branch", () => acts.edit(message))];
  if (message.role === "tool") return h("div", { class: "who" }, h("span", {}, who(message)), branches(talk, message, acts, isBusy));
  if (message.role === "assistant") actions.push(act("Regenerate", "Another reply to the same message (r)", () => acts.regenerate(message)));
  actions.push(copyButton(() => message.content, { title: "Copy the text of this message" }));
  actions.push(act("Branch", "Say something else after this", () => acts.branch(message)));
  return h("div", { class: "who" }, h("span", {}, who(message)), branches(talk, message, acts, isBusy), h("span", { class: "actions" }, actions));
}

function branches(talk, message, acts, isBusy) {
  const { all, nth } = siblings(talk, message);
  if (all.length < 2) return null;
  const go = (words, label, to) => button(words, { class: "plain", "aria-label": label, disabled: isBusy || !all[to] }, () => acts.choose(all[to]));
  return h("span", { class: "branches", role: "group", "aria-label": "Branches" },
    go("‹", "Previous branch", nth - 1), h("span", { class: "number" }, `${nth + 1}/${all.length}`), go("›", "Next branch", nth + 1));
}

function body(message) {
  const made = h("div", { class: "body" });
  if (message.pictures?.length) made.append(h("div", { class: "pictures" }, message.pictures.map((url) => attached(url))));
  if (message.thinking) made.append(thinking(message));
  if (message.role === "tool") return h("div", { class: "body" }, h("div", { class: "said" }, message.content));
  if (message.content || message.isWriting || message.role === "user") {
    const isLong = message.role === "user" && message.content.length > LONG_CHARS;
    made.append(h("div", { class: `said${message.isWriting ? " caret" : ""}${isLong ? " long" : ""}`, tabindex: isLong ? "0" : null }, rendered(message.content) ?? markdown(message.content)));
  }
  for (const call of message.calls ?? []) made.append(h("div", { class: "call", "aria-label": "Tool call" }, h("b", {}, call.function.name), `(${call.function.arguments})`));
  if (message.error) made.append(h("div", { class: "failed", role: "alert" }, h("p", {}, trouble(message.error))));
  if (message.role === "assistant") made.append(cost(message));
  return made;
}

function attached(url) {
  return /^data:image\/(png|jpeg|webp|gif);base64,/.test(url) ? h("img", { src: url, alt: "attached image" }) : h("span", {}, "(image)");
}

function thinking(message) {
  const words = message.isWriting && !message.content ? "Thinking…" : "Thought";
  return h("details", { class: "thinking", open: message.isWriting && !message.content }, h("summary", {}, words), h("div", { class: "thought" }, message.thinking));
}

/** A form for what the tools that a reply calls have found; `done` gets a text per call. */
export function resultsForm(message, done) {
  const areas = message.calls.map(() => h("textarea", { rows: "2", placeholder: "What it returned" }));
  const send = () => done(areas.map((area) => area.value));
  return h("div", { class: "results", role: "group", "aria-label": "Tool results" },
    message.calls.map((call, nth) => h("label", {}, `Result of ${call.function.name}`, areas[nth])),
    h("div", { class: "row-end" }, button("Send the results", { class: "primary", id: "send-results" }, send)));
}

/** The bar of a turn: reused, read anew, what that saved, time to first token; open it for the reason. */
function cost(message) {
  const { timings, progress } = message;
  if (!timings && !progress) return h("div", { class: "turn" }, message.note ? h("span", { class: "chip bare" }, message.note) : null);
  const [n_cached, n_read] = timings ? [timings.cache_n, timings.prompt_n] : [progress.cached, progress.read];
  const figures = [h("span", { class: "chip was" }, `${count(n_cached)} reused`), h("span", { class: "chip now" }, `${count(n_read)} read anew`)];
  if (message.isStopped) figures.push(h("span", { class: "chip bare" }, "stopped"));
  if (timings) figures.push(h("span", { class: "chip bare first", title: "Waiting, restoring and reading, by the server's clock" }, `first token ${duration(timings.queue_ms + timings.prompt_ms)}`));
  if (timings?.predicted_n > 1) figures.push(h("span", { class: "chip bare" }, `${count(timings.predicted_per_second)} tokens/s`));
  const bar = reuseBar(n_cached, n_read);
  if (!timings) return h("div", { class: "turn" }, bar, h("div", { class: "figures" }, figures));
  const saved = counterfactual(n_cached, n_read, timings.prompt_ms, message.cold_ms ?? null);
  return h("details", { class: "turn" }, h("summary", { title: "Why?" }, bar, h("div", { class: "saved number" }, saved), h("div", { class: "figures" }, figures)),
    whyCard(timings.cache, n_cached, n_read, phasesOf(timings)));
}
