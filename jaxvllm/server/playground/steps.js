// Draws the batch of each step: tokens of decoding rows and of prompts, and the padding up to the bucket.

import { palette, prepared, track } from "./canvas.js";

const HEIGHT = 96;
const BAR = 3; // pixels of a step
const LABELS = 26; // pixels at the left for the numbers of tokens

export class StepsPicture {
  #canvas;
  #summary;
  #steps = [];

  constructor({ canvas, summary, explain }) {
    this.#canvas = canvas;
    this.#summary = summary;
    track(canvas, (at) => explain(at && this.#describe(at)));
  }

  /** Draws the latest of the steps from the server. */
  update({ steps }) {
    this.#steps = steps.slice(-Math.floor((this.#canvas.clientWidth - LABELS) / BAR));
    this.#draw();
    this.#summary.textContent = this.#steps.length ? summary(this.#steps) : "None yet.";
  }

  #draw() {
    const width = this.#canvas.clientWidth;
    const context = prepared(this.#canvas, HEIGHT);
    const colours = palette(this.#canvas);
    // The scale is logarithmic, so that one decoding row and a prompt of thousands of tokens are both visible.
    const top = Math.log2(1 + Math.max(16, ...this.#steps.map((step) => step.bucket)));
    const y = (tokens) => HEIGHT - ((HEIGHT - 12) * Math.log2(1 + tokens)) / top;
    context.font = `10px ${getComputedStyle(this.#canvas).fontFamily}`;
    for (let tokens = 1; Math.log2(1 + tokens) <= top; tokens *= 8) {
      context.fillStyle = colours("line");
      context.fillRect(0, Math.round(y(tokens)), width, 1);
      context.fillStyle = colours("muted");
      context.fillText(tokens, 0, y(tokens) - 2);
    }
    this.#steps.forEach(({ decode, prefill, bucket }, i) => {
      const x = width - (this.#steps.length - i) * BAR;
      let from = 0;
      for (const [name, to] of Object.entries({ decode, prefill: decode + prefill, padding: bucket })) {
        context.fillStyle = colours(name);
        context.fillRect(x, y(to), BAR - 1, y(from) - y(to));
        from = to;
      }
    });
  }

  #describe({ x }) {
    const step = this.#steps[this.#steps.length - 1 - Math.floor((this.#canvas.clientWidth - x) / BAR)];
    if (!step) return null;
    const tokens = `${step.decode} decode + ${step.prefill} prefill in a bucket of ${step.bucket}`;
    return `replica ${step.replica}: ${tokens}; host ${ms(step.host_ms)}, device ${ms(step.device_ms)}`;
  }
}

function summary(steps) {
  const sum = (of) => steps.reduce((total, step) => total + of(step), 0);
  const median = (of) => ms(steps.map(of).sort((a, b) => a - b)[steps.length >> 1]);
  const padding = 1 - sum(({ decode, prefill }) => decode + prefill) / sum(({ bucket }) => bucket);
  const times = `host ${median((step) => step.host_ms)} · device ${median((step) => step.device_ms)}`;
  return `${Math.round(100 * padding)}% padding · ${times}`;
}

const ms = (value) => `${value.toFixed(value < 10 ? 2 : 0)} ms`;
