// Keeps the end of a growing text in view.

const CLOSE = 60; // pixels, three lines: text goes on growing while a reader scrolls down to its end

/** Scrolls `pane` along with its `content`, unless the reader has scrolled up. */
export class EndFollower {
  #pane;
  #isFollowing = true;
  #top = 0;

  constructor(pane, content) {
    this.#pane = pane;
    pane.addEventListener("scroll", () => this.#scrolled());
    const observer = new ResizeObserver(() => this.#isFollowing && this.toEnd());
    observer.observe(content); // new text arrived
    observer.observe(pane); // the window changed, or a keyboard appeared
  }

  toEnd() {
    this.#isFollowing = true;
    this.#pane.scrollTop = this.#pane.scrollHeight;
  }

  #scrolled() {
    const { scrollTop, scrollHeight, clientHeight } = this.#pane;
    const below = scrollHeight - clientHeight - scrollTop;
    if (scrollTop < this.#top) this.#isFollowing = below < 2; // positions are fractions on some screens
    else if (below < CLOSE) this.#isFollowing = true;
    this.#top = scrollTop;
  }
}
