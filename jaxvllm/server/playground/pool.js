// Draws the page pool: a cell for each page, in the colours of the requests that own it.

import { palette, prepared, track } from "./canvas.js";
import { make } from "./dom.js";

const STATES = ["free", "owned", "cached", "trash"]; // the names of the server's state numbers, and of their colours
const HEIGHT = 200; // pixels that a pool should fill; more pages than fit make it taller
const [SMALLEST, LARGEST] = [3, 16]; // pixels of a cell
const LISTED = 8; // the most requests in the list

export class PoolPicture {
  #parts;
  #pools = []; // one for each replica

  constructor(parts) {
    this.#parts = parts;
  }

  /** Draws the state from the server. */
  update({ replicas, stats, page_size: pageSize }) {
    const { root, summary, list, colours, explain } = this.#parts;
    if (this.#pools.length !== replicas.length) {
      this.#pools = replicas.map((_, i) => new Pool(replicas.length > 1 ? `replica ${i}, ` : "", colours, explain));
      root.replaceChildren(...this.#pools.map((pool) => pool.canvas));
    }
    replicas.forEach((replica, i) => this.#pools[i].draw(replica, pageSize));
    const pages = `${stats.pages_owned} of ${stats.pages} pages`;
    summary.textContent = `${pages} · ${stats.running} running · ${stats.waiting} waiting`;
    const requests = replicas.flatMap((replica) => replica.requests);
    const more = requests.length > LISTED ? [make("li", {}, `and ${requests.length - LISTED} more`)] : [];
    list.replaceChildren(...requests.slice(0, LISTED).map((request) => line(request, colours.of(request.id))), ...more);
  }
}

class Pool {
  canvas = make("canvas", { role: "img" });
  #name;
  #colours;
  #size = LARGEST;
  #columns = 1;
  #states = [];
  #pageSize = 0;
  #owners = new Map(); // page -> its requests

  constructor(name, colours, explain) {
    this.#name = name;
    this.#colours = colours;
    track(this.canvas, (at) => explain(at && this.#describe(at)));
  }

  draw({ states, requests }, pageSize) {
    [this.#states, this.#pageSize, this.#owners] = [states, pageSize, new Map()];
    for (const request of requests) {
      for (const page of request.pages) this.#owners.set(page, [...(this.#owners.get(page) ?? []), request]);
    }
    const width = this.canvas.clientWidth;
    if (!width) return; // the canvas is not visible
    const fitting = Math.floor(Math.sqrt((width * HEIGHT) / states.length));
    this.#size = Math.max(SMALLEST, Math.min(LARGEST, fitting));
    this.#columns = Math.floor(width / this.#size);
    const context = prepared(this.canvas, Math.ceil(states.length / this.#columns) * this.#size);
    const [ink, ...plain] = ["ink", ...STATES].map(palette(this.canvas));
    const shared = new Set(requests.flatMap((request) => request.shared));
    const inside = this.#size - 1;
    const dot = Math.max(1, Math.round(inside / 3));
    let filling = "";
    states.forEach((state, page) => {
      const [x, y] = [(page % this.#columns) * this.#size, Math.floor(page / this.#columns) * this.#size];
      // A page of several requests has a stripe for each of up to three of them, and a dot.
      const stripes = this.#owners.get(page)?.slice(0, 3).map(({ id }) => this.#colours.of(id)) ?? [plain[state]];
      stripes.forEach((stripe, i) => {
        if (stripe !== filling) context.fillStyle = filling = stripe; // setting it parses the text
        context.fillRect(x, y + (i * inside) / stripes.length, inside, inside / stripes.length);
      });
      if (!shared.has(page)) return;
      context.fillStyle = filling = ink;
      context.fillRect(x + (inside - dot) / 2, y + (inside - dot) / 2, dot, dot);
    });
    const counts = STATES.map((name, state) => `${states.filter((other) => other === state).length} ${name}`);
    this.canvas.ariaLabel = `${this.#name}pages: ${counts.join(", ")}; ${shared.size} shared`;
  }

  #describe({ x, y }) {
    const page = Math.floor(y / this.#size) * this.#columns + Math.floor(x / this.#size);
    if (page >= this.#states.length) return null;
    const where = `${this.#name}page ${page}`;
    const owners = this.#owners.get(page);
    if (!owners) return `${where}: ${STATES[this.#states[page]]}`;
    const first = owners[0].pages.indexOf(page) * this.#pageSize;
    const ids = owners.map(({ id }) => id).join(", ");
    return `${where}: tokens ${first} to ${first + this.#pageSize - 1} of ${ids}`;
  }
}

function line({ id, tokens, pages, shared }, colour) {
  const count = `${tokens} tokens in ${pages.length} pages${shared.length ? `, ${shared.length} shared` : ""}`;
  const line = make("li", {}, make("i"), make("code", { title: id }, id), count);
  line.style.setProperty("--request", colour);
  return line;
}
