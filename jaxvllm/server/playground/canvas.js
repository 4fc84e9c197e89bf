// Functions for the canvases of both pictures.

/** Clears a canvas for drawing in CSS pixels, sharp on every screen, and returns its context. */
export function prepared(canvas, height) {
  const width = canvas.clientWidth;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * devicePixelRatio);
  canvas.height = Math.round(height * devicePixelRatio);
  const context = canvas.getContext("2d");
  context.scale(devicePixelRatio, devicePixelRatio);
  return context;
}

/** Returns the page's colours by their names in style.css, in the reader's light or dark scheme. */
export function palette(canvas) {
  const style = getComputedStyle(canvas);
  return (name) => style.getPropertyValue(`--${name}`);
}

/** Calls `show` with the pointer's position on a canvas, and with null when the pointer leaves it. */
export function track(canvas, show) {
  canvas.addEventListener("pointermove", ({ offsetX, offsetY }) => show({ x: offsetX, y: offsetY }));
  canvas.addEventListener("pointerleave", () => show(null));
}
