// Assembles the page: a conversation for each mode, one request at a time, and a view of the engine.

import { apiKey, engineState, model } from "./api.js";
import { CHAT, COMPLETION, Conversation } from "./chat.js";
import { Colours } from "./colour.js";
import { copy } from "./clipboard.js";
import { byId } from "./dom.js";
import { PoolPicture } from "./pool.js";
import { Settings } from "./settings.js";
import { StepsPicture } from "./steps.js";
import { SavedConversations } from "./storage.js";
import { Alternatives } from "./tokens.js";

const WATCH_MS = 250;
const COPIED_MS = 1500; // time for which a button says that it has copied
const PAUSE_MS = 2000; // pause before the page asks a server again that did not answer

const [prompt, send, stop, clear, modes] = ["prompt", "send", "stop", "clear", "modes"].map(byId);
const { key, probabilities, drafts } = byId("sampling").elements;

const colours = new Colours();
const settings = new Settings(byId("sampling"));
const alternatives = new Alternatives(byId("alternatives"), byId("talk"));
const tools = { settings, colours, alternatives };
const conversations = {
  chat: new Conversation(byId("chat"), CHAT, tools),
  completion: new Conversation(byId("completion"), COMPLETION, tools),
};
const currentMode = () => modes.querySelector(":checked").value;
const conversation = () => conversations[currentMode()];

const saved = new SavedConversations();

let served = null; // the model: {id, contextLength}, once the server has answered
let running = null; // AbortController of the answer that is being written

// Runs one answer to its end. Meanwhile the page offers to stop it.
async function run(answering) {
  if (running || !served || !settings.isValid()) return;
  running = new AbortController();
  showRunning();
  const { error } = await answering(served, running.signal);
  running = null;
  showRunning();
  saveTurns();
  if (error?.status === 401) key.focus();
}

function showRunning() {
  const busy = running !== null;
  [send.hidden, stop.hidden] = [busy, !busy];
  [modes.disabled, clear.disabled] = [busy, busy];
  document.body.classList.toggle("busy", busy);
  prompt.placeholder = conversation().hint;
}

// Sends the typed text, or another text in place of an earlier turn.
function say(text, instead) {
  if (!conversation().accepts(text)) return;
  run((model, signal) => {
    if (!instead) prompt.value = "";
    return conversation().say(text, model, signal, instead);
  });
}

function clearConversation() {
  conversation().clear();
  showRunning();
  saveTurns();
  prompt.focus();
}

async function copyFrom(button, text) {
  button.textContent = (await copy(text)) ? "Copied" : "Not copied";
  setTimeout(() => (button.textContent = "Copy"), COPIED_MS);
}

// The actions of a conversation's buttons, by their class.
const ACTIONS = {
  retry: (turn) => say(turn.prompt, turn),
  edit: (turn) => turn.edit(),
  explain: (turn) => turn.explain(),
  copy: (turn, button) => copyFrom(button, turn.answer.text),
  "copy-code": (turn, button) => copyFrom(button, button.closest(".code").querySelector("code").textContent),
  "drop-oldest": () => run((model, signal) => conversation().dropOldest(model, signal)),
  clear: clearConversation,
};

byId("talk").addEventListener("click", ({ target }) => {
  ACTIONS[target.className]?.(conversation().turnOf(target), target);
  if (!target.matches(".examples > button")) return;
  prompt.value = target.textContent;
  say(prompt.value);
});

byId("talk").addEventListener("submit", (event) => {
  event.preventDefault();
  const turn = conversation().turnOf(event.target);
  say(turn ? event.target.querySelector("textarea").value : prompt.value, turn);
});

byId("talk").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || !event.target.matches("textarea")) return;
  event.preventDefault();
  event.target.form.requestSubmit();
});

document.addEventListener("keydown", ({ key }) => {
  if (key === "Escape" && !document.querySelector("dialog[open]")) running?.abort(); // of a dialog, Escape closes it
});
stop.addEventListener("click", () => running?.abort());
clear.addEventListener("click", clearConversation);

function showMode() {
  for (const [mode, shown] of Object.entries(conversations)) byId(mode).parentElement.hidden = shown !== conversation();
  for (const id of ["system", "tools"]) byId(id).hidden = conversation() !== conversations.chat;
  showRunning();
}

modes.addEventListener("change", () => {
  showMode();
  saved.saveMode(currentMode());
});

for (const input of [probabilities, drafts]) {
  input.addEventListener("change", () => {
    for (const each of Object.values(conversations)) each.show();
  });
}

key.value = apiKey.get();
key.addEventListener("change", () => apiKey.set(key.value.trim()));

// ---- the state that survives a reload ----

// Saves only the conversation that this tab changed: the other one may have continued in another tab.
const saveTurns = () => saved.saveTurns(currentMode(), conversation().saved);

// Saves only while an answer is being written, which is not saved yet. Otherwise another tab may have saved newer text.
for (const event of ["pagehide", "visibilitychange"]) addEventListener(event, () => running && saveTurns());

function restore() {
  const { mode, ...turns } = saved.load();
  for (const [name, each] of Object.entries(conversations)) each.restore(turns[name]);
  for (const input of modes.querySelectorAll("input")) input.checked = input.value === mode;
}

if (matchMedia("(max-width: 46rem)").matches) byId("settings").open = false;
restore();
showMode();
prompt.focus({ preventScroll: true });

// ---- the view of the server, while the page is visible ----

const explain = (text) => (byId("detail").textContent = text ?? "Point at a page or a step.");
const pictures = [
  new PoolPicture({ root: byId("pool"), summary: byId("pool-summary"), list: byId("requests"), colours, explain }),
  new StepsPicture({ canvas: byId("steps"), summary: byId("steps-summary"), explain }),
];

async function connect() {
  const { id, max_model_len: contextLength } = await model();
  served = { id, contextLength: contextLength ?? Infinity };
  byId("model").textContent = id;
  document.title = `${id} · jaxvllm`;
  if (contextLength) settings.limit(contextLength);
}

async function watch(connected) {
  let pause = WATCH_MS;
  if (document.visibilityState === "visible") {
    let problem = "";
    try {
      if (!connected) await connect();
      connected = true;
      const state = await engineState();
      drafts.parentElement.hidden = !state.has_drafts;
      const start = performance.now();
      for (const picture of pictures) picture.update(state);
      pause = Math.max(WATCH_MS, 10 * (performance.now() - start)); // a large pool may take a tenth of the time
    } catch (error) {
      problem = error.status === 401 ? "This server wants an API key: give it under Settings." : error.message;
      [connected, pause] = [false, PAUSE_MS]; // the server may come back with another model
    }
    byId("status").textContent = problem;
  }
  setTimeout(watch, pause, connected);
}

watch(false);
