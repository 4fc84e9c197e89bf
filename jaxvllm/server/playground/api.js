// What the page asks of the server. Addresses are relative, so that it also works behind a proxy's prefix.

const KEY = "jaxvllm.api-key";

/** What went wrong, in words for the reader. `status` is HTTP's, or 0 when there was no answer. */
export class ServerError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** The API key, remembered by this tab alone. */
export const apiKey = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY)),
};

/** The first model that is served: {id, max_model_len, ...}. */
export async function model() {
  const { data } = await (await call("v1/models")).json();
  if (!data.length) throw new ServerError("the server has no model");
  return data[0];
}

/** What the engine is doing now: its pages, its requests, its last steps. */
export async function engineState() {
  return (await call("playground/state")).json();
}

/** Yields the chunks of a streamed answer. `signal` ends it, on the server too. */
export async function* stream(path, body, signal) {
  const stream_options = { include_usage: true, continuous_usage_stats: true }; // a stopped answer has numbers too
  const response = await call(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options }),
    signal,
  });
  for await (const { name, data } of events(response.body)) {
    if (data === "[DONE]") return;
    const value = JSON.parse(data);
    if (name === "error" || value.error) throw new ServerError(explanation(value) ?? "the answer broke off");
    yield value;
  }
  throw new ServerError("the connection ended before the answer did");
}

async function call(path, { headers = {}, ...options } = {}) {
  const key = apiKey.get();
  if (key) headers.Authorization = `Bearer ${key}`;
  const response = await answered(fetch(path, { ...options, headers }));
  if (response.ok) return response;
  const value = await response.json().catch(() => null);
  const wait = response.headers.get("Retry-After");
  const reason = explanation(value) ?? `the server answered ${response.status} ${response.statusText}`;
  throw new ServerError(wait ? `${reason} (try again in ${wait} s)` : reason, response.status);
}

// fetch has one TypeError for everything that can happen to a connection, with a text that differs by browser.
async function answered(promise) {
  try {
    return await promise;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("the server cannot be reached");
  }
}

const explanation = (value) => value?.error?.message ?? value?.message;

// Server-sent events. Lines that are neither data nor a name are comments, which keep the connection open.
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
