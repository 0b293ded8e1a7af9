// Building elements. Text only ever becomes text nodes: nothing here parses markup.

export const find = (id) => document.getElementById(id);

/** An element; `on` holds listeners, `style` custom values, everything else are attributes. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else if (name === "style") for (const [key, set] of Object.entries(value)) element.style.setProperty(key, set);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function button(words, attributes, listener) {
  return h("button", { type: "button", ...attributes, on: { click: listener } }, words);
}

/** Announces a text to screen readers. */
export function say(words) {
  find("said").textContent = words;
}

const SURE_MS = 3000;
const armed = new Map(); // until when a button waits for its second click, by its key: it may be drawn anew meanwhile

/** A button that acts on the second press, within some seconds of the first. */
export function twice(words, sure, attributes, listener) {
  const key = attributes["data-key"] ?? {};
  const made = button(words, attributes, () => {
    if (isArmed()) {
      armed.delete(key);
      return listener();
    }
    armed.set(key, performance.now() + SURE_MS);
    show();
  });
  const isArmed = () => (armed.get(key) ?? 0) > performance.now();
  const show = () => {
    made.textContent = isArmed() ? sure : words;
    if (isArmed()) setTimeout(show, armed.get(key) - performance.now() + 1);
    else armed.delete(key);
  };
  show();
  return made;
}
