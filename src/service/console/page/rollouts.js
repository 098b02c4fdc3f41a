"use strict";
// The tab Rollouts: steps, groups of a step, rollouts of a group, tokens of a rollout.

const mean = values => values.reduce((sum, value) => sum + value, 0) / (values.length || 1);
const spansText = versions => versions.map(([version, count]) => `${count} of ${version}`).join(", ");
let shownStep = null;

async function showRollouts() {
  const {steps, older} = await ask("rollouts");
  const options = steps.map(step => [step, `${step + 1}`]);
  fill(element("step"), options.length ? options : [["", "none is recorded"]]);
  element("step").title = older ? `${older} more steps are in rollouts/` : "";
  if (shownStep !== element("step").value) await showStep();
}

async function showStep() {
  const step = shownStep = element("step").value;
  const list = element("groups");
  list.textContent = element("group-note").textContent = element("group-rollouts").textContent = element("rollout-tokens").textContent = "";
  if (step === "") return;
  const {groups, whole} = await ask("groups", {step});
  if (step !== shownStep) return; // another step was chosen meanwhile
  groups.forEach((group, number) => {
    const title = `${group.why}: reward ${mean(group.rewards).toFixed(3)}, problem ${group.problem}`;
    const button = make(make(list, "li"), "button", {type: "button", class: "group"}, title);
    button.addEventListener("click", act(() => showGroup(step, number, button)));
  });
  if (!whole) make(list, "li", {class: "note"}, "The file is long: further groups are in it.");
  if (groups.length) await showGroup(step, 0, list.querySelector("button"));
}

function mark(chosen, all) {
  for (const each of all) each.removeAttribute("aria-current");
  chosen.setAttribute("aria-current", "true");
}

async function showGroup(step, number, button) {
  mark(button, element("groups").querySelectorAll("button"));
  element("group-note").textContent = element("group-rollouts").textContent = element("rollout-tokens").textContent = "";
  const group = await ask("group", {step, group: number});
  if (!button.isConnected || !button.hasAttribute("aria-current")) return; // another group was chosen meanwhile
  element("group-note").textContent =
    `problem ${group.problem} (${group.tags.join(", ")}), trained on in step ${group.step + 1}, floor ${group.floor}`;
  const table = element("group-rollouts");
  drawRows(table, ["rollout", "reward", "advantage", "ended by", "turns", "tokens", "of versions"], group.rollouts.map((each, i) => [i, each]),
    ([i, each]) => [i, short(each.reward), short(each.advantage), each.stop_reason, each.turns, each.tokens, spansText(each.versions)]);
  [...table.querySelectorAll("tr")].slice(1).forEach((line, rollout) => {
    line.tabIndex = 0;
    const show = act(() => showRollout(step, number, rollout, line));
    line.addEventListener("click", show);
    line.addEventListener("keydown", event => { if (event.key === "Enter") show(event); });
  });
  if (group.rollouts.length) await showRollout(step, number, 0, table.querySelectorAll("tr")[1]);
}

async function showRollout(step, group, rollout, line) {
  mark(line, element("group-rollouts").querySelectorAll("tr"));
  const load = start => ask("rollout", {step, group, rollout, start});
  await new TokenView(element("rollout-tokens"), load, `rollout ${rollout}`).show();
}

element("step").addEventListener("change", act(showStep));
