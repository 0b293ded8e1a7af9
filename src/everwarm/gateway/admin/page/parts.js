// Elements of both the chat and the request list: the bar of reused and read tokens, the timeline, and the reason.

import { h } from "./dom.js";
import { count, duration, explained } from "./words.js";

const PHASES = { queue: "waited", restore: "restored", prefill: "read", decode: "wrote" };

export function reuseBar(n_cached, n_read) {
  const label = `${count(n_cached)} tokens reused, ${count(n_read)} read anew`;
  return h("div", { class: "reuse", role: "img", "aria-label": label },
    h("i", { class: "was", style: { "flex-grow": n_cached } }), h("i", { class: "now", style: { "flex-grow": n_read } }));
}

/** Where a request's time went; `phases` are `{name, ms}`. */
export function timeline(phases) {
  const spent = phases.filter((phase) => phase.ms > 0);
  const label = spent.map((phase) => `${PHASES[phase.name] ?? phase.name} ${duration(phase.ms)}`).join(", ");
  return h("div", { class: "timeline" },
    h("div", { class: "phases", role: "img", "aria-label": label },
      spent.map((phase) => h("i", { class: `phase-${phase.name}`, style: { "flex-grow": phase.ms } }))),
    h("div", { class: "phase-keys" },
      spent.map((phase) => h("span", { class: `chip phase-key phase-${phase.name}` }, `${PHASES[phase.name] ?? phase.name} ${duration(phase.ms)}`))));
}

/** Why the prompt was read, and the text on both sides of the first difference if the request enabled that. */
export function whyCard(cache, n_cached, n_read, phases) {
  const card = h("div", { class: "why" }, explained(cache, n_cached, n_read).map((text) => h("p", {}, text)));
  const diverged = cache?.diverged;
  if (diverged && (diverged.known || diverged.given)) {
    card.append(h("div", { class: "words", role: "group", "aria-label": "The first difference" },
      diverged.before ?? "", h("del", { title: "known before" }, diverged.known ?? ""), " ", h("ins", { title: "given now" }, diverged.given ?? "")));
  }
  card.append(timeline(phases));
  return card;
}

export function phasesOf(timings) {
  const prefill_ms = Math.max(0, timings.prompt_ms - timings.restore_ms);
  return [
    { name: "queue", ms: timings.queue_ms }, { name: "restore", ms: timings.restore_ms },
    { name: "prefill", ms: prefill_ms }, { name: "decode", ms: timings.predicted_ms },
  ];
}
