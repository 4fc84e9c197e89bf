// What both pictures need of a canvas.

/** A canvas cleared for drawing in CSS pixels, sharp on every screen. */
export function prepared(canvas, height) {
  const width = canvas.clientWidth;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * devicePixelRatio);
  canvas.height = Math.round(height * devicePixelRatio);
  const context = canvas.getContext("2d");
  context.scale(devicePixelRatio, devicePixelRatio);
  return context;
}

/** The page's colours by their names in style.css, light or dark as the reader has it. */
export function palette(canvas) {
  const style = getComputedStyle(canvas);
  return (name) => style.getPropertyValue(`--${name}`);
}

/** Tells `show` of the pointer's place on a canvas, and null when it left. */
export function track(canvas, show) {
  canvas.addEventListener("pointermove", ({ offsetX, offsetY }) => show({ x: offsetX, y: offsetY }));
  canvas.addEventListener("pointerleave", () => show(null));
}
