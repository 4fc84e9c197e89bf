// What JavaScript clients get from a server: `node clients.mjs URL KEY` prints one JSON object, a key a check.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";
import OpenAI from "openai";

const [baseURL, apiKey] = process.argv.slice(2);
const messages = [{ role: "user", content: "What is the capital of France?" }];
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const asked = { model: "demo", messages, temperature: 0, max_tokens: 20 };

async function textOf(stream, piece) {
  let text = "";
  for await (const part of stream) text += piece(part) ?? "";
  return text;
}

async function errorOf(work) {
  try {
    await work();
  } catch (error) {
    return { name: error.constructor.name, status: error.status, message: error.message, param: error.param };
  }
  return null;
}

const aborted = async () => {
  const controller = new AbortController();
  const stream = await client.chat.completions.create(
    { ...asked, max_tokens: 400, stream: true, ignore_eos: true },
    { signal: controller.signal },
  );
  let count = 0;
  for await (const _ of stream) if (++count === 3) controller.abort();
  return count;
};

const compatible = createOpenAICompatible({ name: "jaxvllm", baseURL, apiKey })("demo");
const provider = createOpenAI({ baseURL, apiKey });
const sdk = { prompt: messages[0].content, temperature: 0, maxOutputTokens: 20, maxRetries: 0 };

const checks = {
  models: async () => (await client.models.list()).data.map((model) => model.id),
  chat: async () => (await client.chat.completions.create(asked)).choices[0].message.content,
  chat_stream: async () =>
    textOf(await client.chat.completions.create({ ...asked, stream: true }), (c) => c.choices[0]?.delta?.content),
  chat_helper: async () => client.chat.completions.stream(asked).finalContent(),
  completion: async () =>
    (await client.completions.create({ model: "demo", prompt: "The capital of France is", max_tokens: 8, temperature: 0 }))
      .choices[0].text,
  responses: async () =>
    (await client.responses.create({ model: "demo", input: messages[0].content, temperature: 0, max_output_tokens: 20 }))
      .output_text,
  responses_stream: async () =>
    textOf(
      await client.responses.create({
        model: "demo", input: messages[0].content, temperature: 0, max_output_tokens: 20, stream: true,
      }),
      (event) => (event.type === "response.output_text.delta" ? event.delta : ""),
    ),
  abort: aborted,
  bad_request: async () => errorOf(() => client.chat.completions.create({ ...asked, temperature: -1 })),
  no_model: async () => errorOf(() => client.chat.completions.create({ ...asked, model: "gpt-17" })),
  no_key: async () =>
    errorOf(() => new OpenAI({ baseURL, apiKey: "wrong", maxRetries: 0 }).chat.completions.create(asked)),
  ai_text: async () => (await generateText({ model: compatible, ...sdk })).text,
  ai_stream: async () => textOf(streamText({ model: compatible, ...sdk }).textStream, (text) => text),
  ai_usage: async () => (await generateText({ model: compatible, ...sdk })).usage,
  ai_openai_chat: async () => (await generateText({ model: provider.chat("demo"), ...sdk })).text,
  ai_openai_responses: async () => (await generateText({ model: provider("demo"), ...sdk })).text,
};

const results = {};
for (const [name, check] of Object.entries(checks)) {
  try {
    results[name] = await check();
  } catch (error) {
    results[name] = { failed: `${error}` };
  }
}
console.log(JSON.stringify(results));
