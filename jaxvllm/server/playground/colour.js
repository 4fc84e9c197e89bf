// The colour of a request, the same in the conversation and in the page pool.

const REMEMBERED = 512; // requests

export class Colours {
  #hues = new Map();
  #next = 285;

  /** Returns an `oklch()` colour far from the latest ones: the hue turns by the golden angle. */
  of(id) {
    if (!this.#hues.has(id)) {
      this.#hues.set(id, this.#next);
      this.#next = (this.#next + 137.5) % 360;
      if (this.#hues.size > REMEMBERED) this.#hues.delete(this.#hues.keys().next().value);
    }
    return `oklch(0.7 0.14 ${this.#hues.get(id)})`;
  }
}
