// The page's current colours for canvases, light or dark. Read again when the theme changes.

const NAMES = ["paper", "raised", "sunk", "ink", "muted", "line", "warm", "warm-soft", "cold"];

let known = null;

export function colours() {
  return (known ??= read());
}

export function forget() {
  known = null;
}

function read() {
  const probe = document.createElement("span");
  document.body.append(probe);
  const found = {};
  for (const name of NAMES) {
    probe.style.color = `var(--${name})`;
    found[name] = getComputedStyle(probe).color;
  }
  probe.remove();
  return found;
}

/** A canvas as large as it is shown, sharp on every screen; returns its context and size in CSS pixels. */
export function fitted(canvas) {
  const { width, height } = canvas.getBoundingClientRect();
  const scale = Math.min(2, window.devicePixelRatio || 1);
  const [w, t] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== w || canvas.height !== t) { canvas.width = w; canvas.height = t; }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  return { context, width, height };
}
