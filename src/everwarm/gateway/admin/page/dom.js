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

/** A button that acts on the second press, within some seconds of the first. */
export function twice(words, sure, attributes, listener) {
  let isArmed = false;
  const made = button(words, attributes, () => {
    if (isArmed) return listener();
    isArmed = true;
    made.textContent = sure;
    setTimeout(() => { isArmed = false; made.textContent = words; }, 3000);
  });
  return made;
}
