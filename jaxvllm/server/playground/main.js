// Puts the page together: one conversation for each mode, one request at a time, and a watch on the engine.

import { apiKey, engineState, model } from "./api.js";
import { CHAT, COMPLETION, Conversation } from "./chat.js";
import { Colours } from "./colour.js";
import { byId } from "./dom.js";
import { PoolPicture } from "./pool.js";
import { Settings } from "./settings.js";
import { StepsPicture } from "./steps.js";
import { Alternatives } from "./tokens.js";

const WATCH_MS = 250;
const PAUSE_MS = 2000; // before a server that did not answer is asked again

const [prompt, send, stop, clear, modes] = ["prompt", "send", "stop", "clear", "modes"].map(byId);
const key = byId("sampling").elements.key;

const colours = new Colours();
const settings = new Settings(byId("sampling"));
const alternatives = new Alternatives(byId("alternatives"), byId("talk"));
const tools = { settings, colours, alternatives };
const conversations = {
  chat: new Conversation(byId("chat"), CHAT, tools),
  completion: new Conversation(byId("completion"), COMPLETION, tools),
};
const conversation = () => conversations[modes.querySelector(":checked").value];

let modelId = null; // until the server has told
let running = null; // AbortController of the answer that is being written

// Runs one answer to its end; the page offers to stop it meanwhile.
async function run(answering) {
  if (running || !modelId || !settings.isValid()) return;
  running = new AbortController();
  showRunning();
  const { error } = await answering(modelId, running.signal);
  running = null;
  showRunning();
  if (error?.status === 401) key.focus();
}

function showRunning() {
  const busy = running !== null;
  [send.hidden, stop.hidden] = [busy, !busy];
  [modes.disabled, clear.disabled] = [busy, busy];
  document.body.classList.toggle("busy", busy);
  prompt.placeholder = conversation().hint;
}

function say() {
  const text = prompt.value;
  if (!conversation().accepts(text)) return;
  run((model, signal) => {
    prompt.value = "";
    return conversation().say(text, model, signal);
  });
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  say();
});

byId("talk").addEventListener("click", ({ target }) => {
  if (target.matches(".retry")) run((model, signal) => conversation().retry(model, signal));
  if (!target.matches(".examples > button")) return;
  prompt.value = target.textContent;
  say();
});

prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  say();
});

document.addEventListener("keydown", ({ key }) => key === "Escape" && running?.abort());
stop.addEventListener("click", () => running?.abort());

clear.addEventListener("click", () => {
  conversation().clear();
  showRunning();
  prompt.focus();
});

modes.addEventListener("change", () => {
  for (const [mode, shown] of Object.entries(conversations)) byId(mode).parentElement.hidden = shown !== conversation();
  byId("system").hidden = conversation() !== conversations.chat;
  showRunning();
});

key.value = apiKey.get();
key.addEventListener("change", () => apiKey.set(key.value.trim()));
if (matchMedia("(max-width: 46rem)").matches) byId("settings").open = false;
showRunning();

// ---- the server, while somebody looks ----

const explain = (text) => (byId("detail").textContent = text ?? "Point at a page or a step.");
const pictures = [
  new PoolPicture({ root: byId("pool"), summary: byId("pool-summary"), list: byId("requests"), colours, explain }),
  new StepsPicture({ canvas: byId("steps"), summary: byId("steps-summary"), explain }),
];

async function connect() {
  const { id, max_model_len: maxModelLen } = await model();
  modelId = id;
  byId("model").textContent = id;
  document.title = `${id} · jaxvllm`;
  if (maxModelLen) settings.limit(maxModelLen);
}

async function watch(connected) {
  let pause = WATCH_MS;
  if (document.visibilityState === "visible") {
    let problem = "";
    try {
      if (!connected) await connect();
      connected = true;
      const state = await engineState();
      const start = performance.now();
      for (const picture of pictures) picture.update(state);
      pause = Math.max(WATCH_MS, 10 * (performance.now() - start)); // a large pool takes a tenth of the time at most
    } catch (error) {
      problem = error.status === 401 ? "This server wants an API key: give it under Settings." : error.message;
      [connected, pause] = [false, PAUSE_MS]; // it may come back with another model
    }
    byId("status").textContent = problem;
  }
  setTimeout(watch, pause, connected);
}

watch(false);
