// Markdown as the server renders it: trees of elements, fetched once per text. The tags and attributes that may be built are listed here, too.

import { json } from "./api.js";
import { button, h, say } from "./dom.js";

const TAGS = new Set(["p", "h3", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "em", "strong", "s", "a", "br", "hr", "code", "pre", "span", "table", "thead", "tbody", "tr", "th", "td"]);
const MATHS = new Set(["math", "mrow", "mi", "mn", "mo", "mtext", "mspace", "ms", "mfrac", "msqrt", "mroot", "mstyle", "mpadded", "mphantom", "msub", "msup", "msubsup", "munder", "mover", "munderover", "mtable", "mtr", "mtd"]);
const MATHS_ATTRIBUTES = new Set(["display", "stretchy", "fence", "form", "accent", "accentunder", "linethickness", "mathvariant", "columnalign", "lspace", "rspace", "width", "displaystyle", "scriptlevel", "minsize", "maxsize", "movablelimits", "largeop"]);
const MATHML = "http://www.w3.org/1998/Math/MathML"; // the name of a namespace
const CLASSES = new Set(["comment", "keyword", "string", "number", "name", "right"]);
const PLAIN = /^[^`*_#[\]|~$\\<>:+=-]*$/; // a text without any of these needs no rendering
const NUMBERED = /^\s*\d+[.)]\s/m;
const MOST_KNOWN = 400;
const MOST_TEXTS = 64; // of one request, as the server has it
const MOST_CHARS = 100_000;

const known = new Map(); // text → tree; null: the server does not render it

/** The elements of a text, or null as long as they are not known. */
export function rendered(text) {
  const tree = known.get(text);
  return tree ? tree.map(built) : null;
}

/** Fetches what is not known of these texts; whether anything came. */
export async function fetchRendered(texts) {
  const wanted = [...new Set(texts)].filter((text) => !known.has(text) && (!PLAIN.test(text) || NUMBERED.test(text)));
  let isNew = false;
  for (const some of batches(wanted)) {
    const answer = await json("/render", { method: "POST", body: { texts: some } }).catch(() => null);
    answer?.trees.forEach((tree, nth) => known.set(some[nth], tree));
    isNew ||= answer !== null;
  }
  for (const text of known.keys()) if (known.size > MOST_KNOWN) known.delete(text);
  return isNew;
}

function* batches(texts) {
  let [some, n_chars] = [[], 0];
  for (const text of texts.filter((each) => each.length <= MOST_CHARS)) {
    if (some.length === MOST_TEXTS || (some.length && n_chars + text.length > MOST_CHARS)) {
      yield some;
      [some, n_chars] = [[], 0];
    }
    some.push(text);
    n_chars += text.length;
  }
  if (some.length) yield some;
}

function built(node) {
  if (typeof node === "string") return node;
  const [tag, given, ...children] = node;
  const inner = children.map(built);
  if (MATHS.has(tag)) return mathElement(tag, given, inner);
  if (!TAGS.has(tag)) return h("span", {}, inner);
  if (tag === "a") return link(given.href, inner);
  if (tag === "pre") return codeBlock(given.language, inner);
  if (tag === "table") return h("div", { class: "table", tabindex: "0", role: "group", "aria-label": "Table" }, h("table", {}, inner));
  return h(tag, { class: CLASSES.has(given.class) ? given.class : null, start: Number.isInteger(given.start) ? given.start : null }, inner);
}

function mathElement(tag, given, inner) {
  const element = document.createElementNS(MATHML, tag);
  for (const [name, value] of Object.entries(given)) if (MATHS_ATTRIBUTES.has(name)) element.setAttribute(name, String(value));
  element.append(...inner);
  return element;
}

function link(href, inner) {
  if (!/^(https?|mailto):/i.test(href)) return h("span", {}, inner);
  return h("a", { href, title: href, target: "_blank", rel: "noopener noreferrer nofollow" }, inner);
}

/** A block of code with its language and a button that copies it. */
export function codeBlock(language, inner) {
  const pre = h("pre", { tabindex: "0" }, inner);
  return h("div", { class: "code" }, h("div", { class: "code-head" }, h("span", { class: "language" }, language || "text"), copyButton(() => pre.textContent)), pre);
}

/** A button that copies what `text` returns when it is pressed. */
export function copyButton(text, attributes = {}) {
  const made = button("Copy", { class: "plain copy", ...attributes }, async () => {
    made.textContent = await copy(text()) ? "Copied" : "Not allowed";
    say(made.textContent);
    setTimeout(() => { made.textContent = "Copy"; }, 1500);
  });
  return made;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch { // no permission, or not a secure address: the old way
    const area = h("textarea", { value: text, class: "unseen" });
    document.body.append(area);
    area.select();
    const isDone = document.execCommand("copy");
    area.remove();
    return isDone;
  }
}
