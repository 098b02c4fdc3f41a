// An agent with OpenAI's client for Node and a tool, which a run trains as a program (Node 20):
//
//   npm install --prefix examples/agents/tools-in-node
//   uv run rl --env.id agent:command --env.args \
//     '{command = ["node", "examples/agents/tools-in-node/agent.mjs"], problems = "examples/agents/sums.jsonl"}' ...
//
// Nothing in it but its first and last lines knows of training: the client reads OPENAI_BASE_URL and OPENAI_API_KEY.
import { readFileSync } from "node:fs";
import OpenAI from "openai";

const { a, b } = JSON.parse(readFileSync(0, "utf8"));
const client = new OpenAI();
const number = { type: "number" };
const add = { name: "add", description: "Adds two numbers.", parameters: { type: "object", properties: { a: number, b: number }, required: ["a", "b"] } };
const messages = [{ role: "user", content: `What is ${a} + ${b}? Use the tool, and then say the number alone.` }];

let reward = 0, calls = 0;
for (let turn = 0; turn < 4; turn++) {
  const answer = await client.chat.completions.create({
    model: process.env.TRIREME_MODEL, messages, tools: [{ type: "function", function: add }],
  });
  const said = answer.choices[0].message;
  messages.push(said);
  if (!said.tool_calls?.length) {
    reward = Number(said.content.trim() === String(a + b));
    break;
  }
  for (const call of said.tool_calls) {
    calls++;
    let content;
    try {
      const given = JSON.parse(call.function.arguments);
      content = String(given.a + given.b);
    } catch (error) {
      content = `error: ${error.message}`;
    }
    messages.push({ role: "tool", tool_call_id: call.id, content });
  }
}
console.log(JSON.stringify({ reward, metrics: { tool_calls: calls } }));
