// Keeps the end of a growing text in view.

const NEAR = 2; // pixels: positions are fractions on some screens

/** Scrolls `pane` along with its `content`, unless the reader has scrolled up. */
export function followEnd(pane, content) {
  let isFollowing = true;
  let last = 0;
  pane.addEventListener("scroll", () => {
    const isAtEnd = pane.scrollHeight - pane.clientHeight - pane.scrollTop <= NEAR;
    isFollowing = isAtEnd || (isFollowing && pane.scrollTop >= last);
    last = pane.scrollTop;
  });
  const observer = new ResizeObserver(() => isFollowing && toEnd(pane));
  observer.observe(content); // text came
  observer.observe(pane); // the window changed, or a keyboard appeared
}

export function toEnd(pane) {
  pane.scrollTop = pane.scrollHeight;
}
