// The two kinds of conversation with a model. Each is a list of turns: the reader's text and the model's answer.

import { roomBehind, stream } from "./api.js";
import { Answer } from "./answer.js";
import { button } from "./dom.js";
import { MarkdownText } from "./markdown.js";
import { EndFollower } from "./scroll.js";
import { PlainText, Turn } from "./turn.js";

/** A conversation of messages, with the model's chat template. */
export const CHAT = {
  isDialogue: true,
  hint: (turns) => (turns.at(-1)?.answer.calls.length ? "What the tool returns" : "Ask something"),
  body(turns, prompt, settings) {
    const messages = settings.system ? [{ role: "system", content: settings.system }] : [];
    let calls = []; // of the last answer; the reader's next text is what they return
    for (const { prompt, answer } of turns) {
      if (!answer.text && !answer.calls.length) continue;
      messages.push(...asked(prompt, calls), message(answer));
      calls = answer.calls;
    }
    messages.push(...asked(prompt, calls));
    const { tools } = settings;
    return { messages, ...(tools.length && { tools }), ...(settings.probabilities && { logprobs: true, top_logprobs: settings.alternatives }) };
  },
  stream: (body, signal) => stream("v1/chat/completions", body, signal),
  read: ({ delta, logprobs, draft_spans: spans = [] }) => ({
    spans,
    text: delta.content ?? "",
    reasoning: delta.reasoning ?? "",
    calls: delta.tool_calls ?? [],
    tokens: logprobs?.content ?? [],
  }),
};

// The reader's text as messages: a question, or the result of each call that the model has made.
const asked = (content, calls) =>
  calls.length
    ? calls.map(({ id }) => ({ role: "tool", tool_call_id: id, content }))
    : [{ role: "user", content }];

const message = ({ text, calls }) => ({
  role: "assistant",
  content: text,
  ...(calls.length && {
    tool_calls: calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } })),
  }),
});

/** One text that the model continues. The reader's texts are added to it. */
export const COMPLETION = {
  isDialogue: false,
  hint: (turns) => (turns.length ? "Add to the text, or send nothing to continue it" : "A text to continue"),
  body(turns, prompt, settings) {
    const text = turns.map((turn) => turn.prompt + turn.answer.text).join("") + prompt;
    return { prompt: text, ...(settings.probabilities && { logprobs: settings.alternatives }) };
  },
  async *stream(body, signal) {
    // Unlike chats, completions end after 16 tokens unless the request has a limit.
    const max_tokens = body.max_tokens ?? (await roomBehind(body.prompt, body.model, signal));
    yield* stream("v1/completions", { ...body, max_tokens }, signal);
  },
  read: ({ text, logprobs, draft_spans: spans = [] }) => ({
    spans,
    text,
    tokens: (logprobs?.tokens ?? []).map((token, i) => ({
      token,
      logprob: logprobs.token_logprobs[i],
      top_logprobs: Object.entries(logprobs.top_logprobs?.[i] ?? {}).map(([token, logprob]) => ({ token, logprob })),
    })),
  }),
};

export class Conversation {
  #element;
  #mode;
  #settings;
  #colours;
  #alternatives;
  #follower;
  #turns = [];

  constructor(element, mode, { settings, colours, alternatives }) {
    this.#element = element;
    this.#mode = mode;
    this.#settings = settings;
    this.#colours = colours;
    this.#alternatives = alternatives;
    this.#follower = new EndFollower(element.parentElement, element);
  }

  get hint() {
    return this.#mode.hint(this.#turns);
  }

  /** Returns the saved form, which `restore` takes. */
  get saved() {
    return this.#turns.map((turn) => turn.saved);
  }

  restore(saved) {
    for (const each of saved) this.#add(each.prompt, Answer.restored(this.#text(), each));
  }

  /** Returns whether a text may be sent. An empty one may not in a chat, but lets a completion continue. */
  accepts(prompt) {
    return prompt.trim() !== "" || (this.#mode === COMPLETION && this.#turns.length > 0);
  }

  /** Returns the turn that has this element. */
  turnOf(element) {
    return this.#turns.find((turn) => turn.element.contains(element));
  }

  /** Shows the tokens and drafts of answers that have them, if the settings say so, or only texts. */
  show() {
    for (const { answer } of this.#turns) answer.show(this.#settings);
  }

  clear() {
    this.#drop(0, this.#turns.length);
  }

  /**
   * Resolves to the answer, whether it is whole, stopped or failed. `instead` is the turn whose place it takes: that
   * and what follows it are dropped.
   */
  async say(prompt, { id, contextLength }, signal, instead) {
    if (instead) this.#drop(this.#turns.indexOf(instead), this.#turns.length);
    const body = { model: id, explain: true, ...this.#settings.sampling(), ...this.#mode.body(this.#turns, prompt, this.#settings) };
    const marks = this.#settings.drafts;
    if (marks) body.stream_options = { include_draft_spans: true };
    const answer = new Answer(this.#text());
    const turn = this.#add(prompt, answer);
    this.#follower.toEnd();
    const alternatives = this.#settings.probabilities ? this.#alternatives : null;
    const chunks = this.#mode.stream(body, signal);
    await answer.fill(chunks, this.#mode.read, { colours: this.#colours, alternatives, marks, contextLength });
    const drop = this.#canDrop ? [button("drop-oldest", "Drop the oldest turns, ask again")] : [];
    turn.end(answer.fills(contextLength) ? [...drop, button("clear", "Clear")] : []);
    return answer;
  }

  /** Drops the older half of the turns before the last question and asks it again, until it fits the context. */
  async dropOldest(model, signal) {
    for (;;) {
      const last = this.#turns.at(-1);
      this.#drop(0, Math.ceil((this.#turns.length - 1) / 2));
      const answer = await this.say(last.prompt, model, signal, last);
      if (!answer.isTooLong || !this.#canDrop) return answer;
    }
  }

  // A completion whose last prompt is empty needs one earlier turn to continue.
  get #canDrop() {
    return this.#turns.length > (this.#turns.at(-1).prompt ? 1 : 2);
  }

  #add(prompt, answer) {
    const turn = new Turn(prompt, answer, this.#mode.isDialogue);
    this.#turns.push(turn);
    this.#element.append(turn.element);
    return turn;
  }

  #drop(from, to) {
    for (const { element } of this.#turns.splice(from, to - from)) element.remove();
  }

  // Only a chat's answers are Markdown, because a completion may break off and continue anywhere.
  #text() {
    return this.#mode.isDialogue ? new MarkdownText() : new PlainText();
  }
}
