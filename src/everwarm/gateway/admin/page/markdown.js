// A little Markdown as elements, for replies that are still being written: paragraphs, headings, lists, code, bold, emphasis.
// What is written is rendered by the server; see render.js.

import { h } from "./dom.js";
import { codeBlock } from "./render.js";

const FENCE = /^\s*(```|~~~)\s*([\w+#.-]{0,24})\s*$/;
const ITEM = /^\s*([-*+]|\d{1,3}[.)])\s+(.*)$/;
const INLINE = /(`[^`\n]+`|\*\*[^*\n]+\*\*|\*[^*\s][^*\n]*\*)/;

export function markdown(text) {
  const lines = text.split("\n");
  const made = document.createDocumentFragment();
  let at = 0;
  while (at < lines.length) {
    const [element, next] = block(lines, at);
    if (element) made.append(element);
    at = next;
  }
  return made;
}

function block(lines, at) {
  const fence = FENCE.exec(lines[at]);
  if (fence) return code(lines, at + 1, fence[1], fence[2]);
  if (!lines[at].trim()) return [null, at + 1];
  const heading = /^#{1,4}\s+(.+)$/.exec(lines[at]);
  if (heading) return [h("h3", {}, inline(heading[1])), at + 1];
  return ITEM.test(lines[at]) ? list(lines, at) : paragraph(lines, at);
}

function code(lines, at, mark, language) {
  const body = [];
  while (at < lines.length && lines[at].trim() !== mark) body.push(lines[at++]);
  return [codeBlock(language, h("code", {}, body.join("\n"))), at + 1];
}

function list(lines, at) {
  const isNumbered = /^\s*\d/.test(lines[at]);
  const made = h(isNumbered ? "ol" : "ul");
  for (let item; at < lines.length && (item = ITEM.exec(lines[at])); at += 1) made.append(h("li", {}, inline(item[2])));
  return [made, at];
}

function paragraph(lines, at) {
  const body = [];
  while (at < lines.length && lines[at].trim() && !FENCE.test(lines[at]) && !(body.length && ITEM.test(lines[at]))) body.push(lines[at++]);
  return [h("p", {}, inline(body.join("\n"))), at];
}

function inline(text) {
  return text.split(INLINE).filter(Boolean).map((part) => {
    if (part.length > 2 && part.startsWith("`") && part.endsWith("`")) return h("code", {}, part.slice(1, -1));
    if (part.length > 4 && part.startsWith("**") && part.endsWith("**")) return h("strong", {}, part.slice(2, -2));
    if (part.length > 2 && part.startsWith("*") && part.endsWith("*")) return h("em", {}, part.slice(1, -1));
    return part;
  });
}
