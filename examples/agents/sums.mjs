// An agent in another language, which a run trains as a program (needs Node 18 and no package):
//
//   uv run rl --env.id agent:command \
//     --env.args '{command = ["node", "examples/agents/sums.mjs"], problems = "examples/agents/sums.jsonl"}' ...
//
// It reads its problem from its input, asks the policy at OPENAI_BASE_URL, and prints its reward as the last line.
import { readFileSync } from "node:fs";

const { a, b } = JSON.parse(readFileSync(0, "utf8"));
const messages = [{ role: "user", content: `What is ${a} + ${b}? Say the number alone.` }];

for (let tries = 1; tries <= 2; tries++) {
  const answer = await fetch(`${process.env.OPENAI_BASE_URL}/chat/completions`, {
    method: "POST",
    headers: { "content-type": "application/json", authorization: `Bearer ${process.env.OPENAI_API_KEY}` },
    body: JSON.stringify({ model: process.env.TRIREME_MODEL, messages }),
  });
  if (!answer.ok) throw new Error(`${answer.status}: ${await answer.text()}`);
  const message = (await answer.json()).choices[0].message;
  if (message.content.trim() === String(a + b)) {
    console.log(JSON.stringify({ reward: 1 / tries, metrics: { tries } }));
    process.exit(0);
  }
  messages.push(message, { role: "user", content: "No. Add them again." });
}
console.log(JSON.stringify({ reward: 0, metrics: { tries: 2 } }));
