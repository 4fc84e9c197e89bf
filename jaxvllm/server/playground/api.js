// The page's requests to the server. Addresses are relative, so that they also work behind a proxy's prefix.

import { StoredText } from "./storage.js";

/** An error with a message for the reader. `status` is HTTP's, or 0 without an answer; `code` is OpenAI's. */
export class ServerError extends Error {
  constructor(message, status = 0, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** The API key, which only this tab remembers. */
export const apiKey = new StoredText("sessionStorage", "jaxvllm.api-key");

/** Returns the first served model: {id, max_model_len, ...}. */
export async function model() {
  const { data } = await (await call("v1/models")).json();
  if (!data.length) throw new ServerError("the server has no model");
  return data[0];
}

/** Returns what the engine is doing now: its pages, its requests and its latest steps. */
export async function engineState() {
  return (await call("playground/state")).json();
}

/** Returns the number of tokens that fit into the context after a text: at least one, so that the server decides. */
export async function roomBehind(prompt, model, signal) {
  const { count, max_model_len: length } = await (await post("tokenize", { model, prompt }, signal)).json();
  return Math.max(1, length - count);
}

/** Yields the chunks of a streamed answer. `signal` ends the answer, also on the server. */
export async function* stream(path, body, signal) {
  // A stopped answer has numbers, too.
  const stream_options = { include_usage: true, continuous_usage_stats: true, ...body.stream_options };
  const response = await post(path, { ...body, stream: true, stream_options }, signal);
  for await (const { name, data } of events(response.body)) {
    if (data === "[DONE]") return;
    const value = JSON.parse(data);
    if (name === "error" || value.error) throw new ServerError(explanation(value) ?? "the answer broke off");
    yield value;
  }
  throw new ServerError("the connection ended before the answer did");
}

function post(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  return call(path, { method: "POST", headers, body: JSON.stringify(body), signal });
}

async function call(path, { headers = {}, ...options } = {}) {
  const key = apiKey.get();
  if (key) headers.Authorization = `Bearer ${key}`;
  const response = await answered(fetch(path, { ...options, headers }));
  if (response.ok) return response;
  const value = await response.json().catch(() => null);
  const wait = response.headers.get("Retry-After");
  const reason = explanation(value) ?? `the server answered ${response.status} ${response.statusText}`;
  throw new ServerError(wait ? `${reason} (try again in ${wait} s)` : reason, response.status, value?.error?.code);
}

// fetch throws the same TypeError for all failures of a connection, and its text differs between browsers.
async function answered(promise) {
  try {
    return await promise;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("the server cannot be reached");
  }
}

const explanation = (value) => value?.error?.message ?? value?.message;

// Parses server-sent events. Lines that are neither data nor a name are comments, which keep the connection open.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let name = "";
  let data = [];
  for (;;) {
    const { value, done } = await answered(reader.read());
    if (done) return;
    const lines = (rest + value).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
      else if (line.startsWith("event:")) name = line.slice(6).trim();
      else if (line === "") {
        if (data.length) yield { name, data: data.join("\n") };
        name = "";
        data = [];
      }
    }
  }
}
