// Three actions that prove the promise: read a long text, ask about it, change the question. Pure.

const SHIPS = ["Aurelia", "Good Intent", "Kittiwake", "Margaret", "Northern Star", "Perseverance", "Sandpiper", "Three Brothers"];
const SKIES = ["a clear sky", "thin cloud from the west", "fog until noon", "rain in long showers", "a red dawn and a still sea", "hail, then sudden calm"];
const WORKS = ["I cleaned the lens and trimmed both wicks", "the boat brought oil and letters", "I painted the lower gallery", "the clockwork was slow and I set it right", "I mended the step on the landing", "nothing broke, and I read until the light was due"];
const FACT = "Remember this: the code of the blue door is 4417.";
const ENTRY_CHARS = 150; // about
const CHARS_PER_TOKEN = 2.5; // of any model, with care

export const QUESTION = "What is the code of the blue door?";
export const OTHER_QUESTION = "What is the capital of France?";

export const STEPS = [
  { title: "Read this long text", about: "A lighthouse keeper's log. All of it is new, so all of it is read.", done: "Read once." },
  { title: "Ask about it", about: "The log is not read again: only your question is.", done: "Only the question was read." },
  { title: "Change your first question", about: "Elsewhere an edit may read everything again. Here it costs the new words.", done: "An edit cost its own words. That is all there is to it." },
];

/** A log of as many days as a third of the context holds, at most forty. */
export function longText(n_ctx) {
  const n_days = Math.max(2, Math.min(40, Math.floor(((n_ctx || 4096) / 3) * CHARS_PER_TOKEN / ENTRY_CHARS)));
  const pick = (all, nth) => all[nth % all.length];
  const days = Array.from({ length: n_days }, (_, nth) =>
    `Day ${nth + 1}. The morning had ${pick(SKIES, 5 * nth + 1)}. The ${pick(SHIPS, 3 * nth + 2)} passed ${nth % 2 ? "outward" : "homeward"} at ${6 + (7 * nth) % 13} o'clock; ${pick(WORKS, 7 * nth + 3)}.`);
  return `The keeper's log\n\n${days.join("\n")}\n\n${FACT}`;
}
