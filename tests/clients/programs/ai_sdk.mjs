// The AI SDK: generateText and streamText with its OpenAI, Anthropic and Google providers.
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

// Packages are looked up from the folder of the part, not from this file's folder.
const resolve = createRequire(`${process.env.CLIENTS}/package.json`).resolve;
const load = (name) => import(pathToFileURL(resolve(name)));
const { generateText, streamText, stepCountIs, tool } = await load("ai");
const { createOpenAI } = await load("@ai-sdk/openai");
const { createAnthropic } = await load("@ai-sdk/anthropic");
const { createGoogleGenerativeAI } = await load("@ai-sdk/google");
const { z } = await load("zod");

const { root, model, system, questions, files, keys } = JSON.parse(readFileSync(0, "utf8"));
const MAX_STEPS = 10;

const models = {
  chat: (apiKey) => createOpenAI({ baseURL: `${root}/v1`, apiKey }).chat(model),
  responses: (apiKey) => createOpenAI({ baseURL: `${root}/v1`, apiKey })(model),
  messages: (apiKey) => createAnthropic({ baseURL: `${root}/v1`, apiKey })(model),
  gemini: (apiKey) => createGoogleGenerativeAI({ baseURL: `${root}/v1beta`, apiKey })(model),
};

async function ask(model, stream) {
  const calls = [];
  const define = (name, run) =>
    tool({
      description: name,
      inputSchema: z.object({ path: z.string() }),
      execute: async ({ path }) => {
        calls.push([name, { path }]);
        return run(path);
      },
    });
  const tools = {
    list_files: define("list_files", () => Object.keys(files).join("\n")),
    read_file: define("read_file", (path) => files[path] ?? `${path} does not exist`),
  };
  const messages = [];
  const answers = [];
  for (const question of questions) {
    messages.push({ role: "user", content: question });
    const request = { model, system, messages, tools, maxRetries: 0, stopWhen: stepCountIs(MAX_STEPS) };
    let result;
    if (stream) {
      result = streamText({ ...request, onError: ({ error }) => { throw error; } });
      await result.consumeStream();
    } else {
      result = await generateText(request);
    }
    messages.push(...(await result.responseMessages));
    answers.push(await result.text);
  }
  return { answers, calls };
}

const report = {};
for (const [name, key] of Object.entries(keys)) {
  const [dialect, streamed] = name.split(" ");
  report[name] = await ask(models[dialect](key), Boolean(streamed));
}
console.log(JSON.stringify(report));
