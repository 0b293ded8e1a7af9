// A conversation with branches: messages form a tree, and one child of each message is chosen. Pure except for the ids.

let n = 0;
export const newId = () => `${Date.now().toString(36)}-${(n++).toString(36)}-${Math.floor(Math.random() * 1e6).toString(36)}`;

export const ROOT = "root";

export function newTalk() {
  return { id: newId(), title: "New conversation", at: Date.now(), messages: {}, chosen: {}, cut: null };
}

export const childrenOf = (talk, parent) => Object.values(talk.messages).filter((each) => each.parent === parent);

/** The messages that are shown, first to last; a cut ends them early, where the next one will branch off. */
export function path(talk) {
  const shown = [];
  let at = talk.cut === ROOT ? null : talk.chosen[ROOT];
  while (at && talk.messages[at]) {
    shown.push(talk.messages[at]);
    at = at === talk.cut ? null : talk.chosen[at];
  }
  return shown;
}

export function add(talk, parent, message) {
  const made = { id: newId(), parent, content: "", ...message };
  talk.messages[made.id] = made;
  talk.chosen[parent] = made.id;
  talk.cut = null;
  talk.at = Date.now();
  return made;
}

export function siblings(talk, message) {
  const all = childrenOf(talk, message.parent);
  return { all, nth: all.findIndex((each) => each.id === message.id) };
}

export function choose(talk, message) {
  talk.chosen[message.parent] = message.id;
  talk.cut = null;
}

export const lastOf = (talk) => path(talk).at(-1) ?? null;

/** The messages up to `leaf`, in the format of the API. */
export function toSend(talk, leaf, system) {
  const lineage = [];
  for (let at = leaf; at; at = talk.messages[at]?.parent) if (talk.messages[at]) lineage.unshift(talk.messages[at]);
  const messages = lineage.filter((each) => !each.error || each.content).map(wire);
  return system.trim() ? [{ role: "system", content: system }, ...messages] : messages;
}

function wire(message) {
  if (message.role === "assistant") {
    const calls = message.calls?.length ? { tool_calls: message.calls } : {};
    return { role: "assistant", content: message.content, ...(message.thinking ? { reasoning_content: message.thinking } : {}), ...calls };
  }
  if (message.role === "tool") return { role: "tool", tool_call_id: message.call, name: message.name, content: message.content };
  if (!message.pictures?.length) return { role: message.role, content: message.content };
  const pictures = message.pictures.map((url) => ({ type: "image_url", image_url: { url } }));
  return { role: message.role, content: [...pictures, { type: "text", text: message.content }] };
}

/** The words around a text in a conversation; null: it is nowhere. Case does not matter. */
export function found(talk, text) {
  const wanted = text.trim().toLowerCase();
  for (const said of [talk.title, ...Object.values(talk.messages).map((message) => message.content)]) {
    const at = said.toLowerCase().indexOf(wanted);
    if (at >= 0) return said.slice(Math.max(0, at - 20), at + wanted.length + 40).replace(/\s+/g, " ");
  }
  return null;
}

/** The first line of a message in plain words, without the marks of Markdown. */
export function titleOf(text) {
  const lines = text.split("\n").map((line) => line.replace(/^\s*(#{1,6}\s+|>\s*|[-*+]\s+|```.*)/, "").replace(/!?\[([^\]]*)\]\([^)]*\)/g, "$1").replace(/(\*\*|__|`)(.+?)\1/g, "$2").trim());
  const line = lines.find(Boolean) ?? "";
  return line.length > 60 ? `${line.slice(0, 58)}…` : line || "New conversation";
}
