// Assembles the page of a report: the batch at work, if there are several requests, and each of them in its turn.

import { make } from "./dom.js";
import { count, drawn, visible } from "./explanation.js";

const { report, notes } = JSON.parse(document.getElementById("data").textContent);
const { explanations, texts, model } = report;
const promptOf = ({ prompt }) => prompt.map(({ text }) => text ?? "?").join("");
const key = ({ batch }) => `${batch.replica}:${batch.number}`;

// Returns every step that one of the requests was in, in order.
function batches() {
  const found = new Map(explanations.flatMap(({ steps }) => steps.map((step) => [key(step), step.batch])));
  return [...found].sort(([, a], [, b]) => a.replica - b.replica || a.number - b.number);
}

function mark(step) {
  if (step.is_dropped) return "×";
  return { prefill: `P${step.query_length}`, forced: `F${step.query_length}`, decode: String(step.num_tokens) }[step.kind];
}

function row(explanation, index, columns) {
  const steps = new Map(explanation.steps.map((step) => [key(step), step]));
  const last = columns.findLastIndex(([name]) => steps.has(name));
  const cells = columns.map(([name], place) => {
    const step = steps.get(name);
    if (!step) return make("td", { className: "waits" }, place < last ? "·" : "");
    const title = `request ${index}, step ${step.batch.number}: ${step.kind}, ${count(step.query_length, "token")} computed`;
    return make("td", { className: step.is_dropped ? "dropped" : step.kind, title }, mark(step));
  });
  const name = make("th", { scope: "row", title: promptOf(explanation) }, `[${index}] ${visible(promptOf(explanation)).slice(0, 24)}`);
  return make("tr", {}, name, ...cells);
}

function timeline() {
  const columns = batches();
  const replicas = new Set(columns.map(([, batch]) => batch.replica)).size;
  const heads = columns.map(([name, batch]) => make("th", {}, replicas > 1 ? name : String(batch.number)));
  const fills = columns.map(([, { num_tokens: tokens, bucket_tokens: bucket }]) => {
    const fill = make("span", { className: "fill" });
    fill.style.setProperty("--full", (tokens / bucket).toFixed(3));
    return make("td", { title: `${count(tokens, "token")} in a bucket of ${bucket}` }, fill);
  });
  const table = make(
    "table",
    {},
    make("thead", {}, make("tr", {}, make("th", {}, "step"), ...heads)),
    make("tbody", {}, ...explanations.map((explanation, index) => row(explanation, index, columns))),
    make("tfoot", {}, make("tr", {}, make("th", { scope: "row" }, "how full its bucket is"), ...fills)),
  );
  const legend =
    "A column is a step of the engine. Pn: a chunk of n prompt tokens; n: so many new tokens; Fn: n tokens that a grammar forced; ×: its output is ignored; ·: waits.";
  return [make("h2", {}, "The batch at work"), make("div", { className: "timeline" }, table), make("p", { className: "note" }, legend), ...notes.map((note) => make("p", {}, note))];
}

const root = document.getElementById("report");
root.append(
  make("h1", {}, explanations.length === 1 ? "One request, step by step" : `${explanations.length} requests, step by step`),
  make("p", { className: "note" }, `Model ${model}. These are the steps that the engine really ran. Open a step to see more; a click on a token of an answer opens its step.`),
);
if (explanations.length > 1) root.append(...timeline());
explanations.forEach((explanation, index) => {
  const name = explanations.length > 1 ? `[${index}] ` : "";
  const drawing = drawn(explanation);
  drawing.querySelector("details")?.setAttribute("open", "");
  root.append(
    make("h2", {}, name, make("code", {}, promptOf(explanation))),
    make("p", { className: "answer-text" }, texts[index]),
    drawing,
  );
});
