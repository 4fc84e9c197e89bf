// The texts that the browser keeps for the page. It may refuse to, have no room, or have texts of another version.

const VERSION = 1; // version of the form of saved conversations
const MODES = ["chat", "completion"];

/** One text in `localStorage` or `sessionStorage`. If the browser refuses, it lasts as long as the page. */
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

  /** Saves a text. An empty text removes the saved one. If there is no room, the earlier text stays. */
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

  /** Returns the last saved state, or empty conversations if there is none that this version can read. */
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

  /** Saves one conversation. The other stays as it was last saved, perhaps by another tab. Empty ones are not kept. */
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

const isTurn = ({ prompt, text, stats, error, calls = [] }) =>
  [prompt, text, stats, error].every((part) => typeof part === "string") && calls.every(isCall);

const isCall = (call) => [call.id, call.name, call.arguments].every((part) => typeof part === "string");
