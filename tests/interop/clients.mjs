// What JavaScript clients get from a server: `node clients.mjs URL KEY` prints one JSON object, a key a check.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateObject, generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";
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
const forms = createOpenAICompatible({ name: "jaxvllm", baseURL, apiKey, supportsStructuredOutputs: true })("demo");
const provider = createOpenAI({ baseURL, apiKey });
const sdk = { prompt: messages[0].content, temperature: 0, maxOutputTokens: 20, maxRetries: 0 };

// ---- tools and forms ----

const question = "What is the weather in Oslo?";
const parameters = {
  type: "object",
  properties: { city: { type: "string", enum: ["Oslo", "Rome"] } },
  required: ["city"],
  additionalProperties: false,
};
const weather = { type: "function", function: { name: "get_weather", description: "The weather.", parameters } };
const report = {
  type: "object",
  properties: { sky: { type: "string", enum: ["sunny", "rainy"] } },
  required: ["sky"],
  additionalProperties: false,
};
const askedTools = {
  ...asked, messages: [{ role: "user", content: question }], max_tokens: 60, tools: [weather],
  tool_choice: "required", parallel_tool_calls: false,
};
const sdkAsked = { ...sdk, prompt: question, maxOutputTokens: 300 };

// What the model says at the end, and with what it called its tool.
const withTool = async (model) => {
  const called = [];
  const get_weather = tool({
    description: "The weather.",
    inputSchema: jsonSchema(parameters),
    execute: async (input) => {
      called.push(input);
      return { sky: "rainy", degrees: 3 };
    },
  });
  const done = await generateText({ model, ...sdkAsked, tools: { get_weather }, stopWhen: stepCountIs(3) });
  return { said: done.text, called, steps: done.steps.length };
};
const object = async (model) => (await generateObject({ model, ...sdkAsked, schema: jsonSchema(report) })).object;

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
  tools: async () => {
    const calls = (await client.chat.completions.create(askedTools)).choices[0].message.tool_calls;
    return calls.map((call) => [call.function.name, JSON.parse(call.function.arguments)]);
  },
  tools_stream: async () => {
    const parts = [];
    for await (const chunk of await client.chat.completions.create({ ...askedTools, stream: true }))
      parts.push(...(chunk.choices[0]?.delta?.tool_calls ?? []));
    return [[parts[0].function.name, JSON.parse(parts.map((part) => part.function.arguments ?? "").join(""))]];
  },
  tools_helper: async () => {
    const calls = (await client.chat.completions.stream(askedTools).finalMessage()).tool_calls;
    return calls.map((call) => [call.function.name, JSON.parse(call.function.arguments)]);
  },
  ai_tool: async () => withTool(compatible),
  ai_openai_chat_tool: async () => withTool(provider.chat("demo")),
  ai_openai_responses_tool: async () => withTool(provider("demo")),
  ai_object: async () => object(forms),
  ai_openai_chat_object: async () => object(provider.chat("demo")),
  ai_openai_responses_object: async () => object(provider("demo")),
  ai_output: async () =>
    (await generateText({ model: forms, ...sdkAsked, output: Output.object({ schema: jsonSchema(report) }) })).output,
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
