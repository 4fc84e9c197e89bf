// What this browser keeps for the page. It may refuse to, have no room, or hold what another version wrote.

const VERSION = 1; // of what a saved conversation looks like
const MODES = ["chat", "completion"];

/** One text in `localStorage` or `sessionStorage`. Where the browser refuses, it lasts as long as the page. */
export class StoredText {
  #area;
  #key;
  #refused = "";

  constructor(area, key) {
    this.#area = area;
    this.#key = key;
  }

  get() {
    try {
      return window[this.#area].getItem(this.#key) ?? this.#refused;
    } catch {
      return this.#refused;
    }
  }

  /** An empty text removes what was there. Where a text finds no room, the one before it stays. */
  set(text) {
    try {
      if (text) window[this.#area].setItem(this.#key, text);
      else window[this.#area].removeItem(this.#key);
      this.#refused = "";
    } catch {
      this.#refused = text;
    }
  }
}

/** Both conversations and the mode last used: {mode, chat, completion}, each conversation a list of saved turns. */
export class SavedConversations {
  #text = new StoredText("localStorage", "jaxvllm.conversations");

  /** What was saved last; empty conversations where nothing was, or something that this version cannot read. */
  load() {
    try {
      const { version, mode, chat, completion } = JSON.parse(this.#text.get());
      const isReadable = version === VERSION && MODES.includes(mode) && [...chat, ...completion].every(isTurn);
      if (isReadable) return { mode, chat, completion };
    } catch {
      // not JSON, or of another shape
    }
    return { mode: MODES[0], chat: [], completion: [] };
  }

  /** The other conversation stays as it was saved last, perhaps by another tab. Nothing is kept of empty ones. */
  saveTurns(mode, turns) {
    const all = { ...this.load(), mode, [mode]: turns };
    if (all.chat.length || all.completion.length) this.#write(all);
    else this.#text.set("");
  }

  saveMode(mode) {
    this.#write({ ...this.load(), mode });
  }

  #write({ mode, chat, completion }) {
    this.#text.set(JSON.stringify({ version: VERSION, mode, chat, completion }));
  }
}

const isTurn = ({ prompt, text, stats, error }) =>
  [prompt, text, stats, error].every((part) => typeof part === "string");
