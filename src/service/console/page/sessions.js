"use strict";
// The tab Sessions: those that were not forgotten, the tree of one, and the tokens up to a node.

let shownSession = null, drawnTree = "";

async function showSessions() {
  const {sessions, others} = await ask("sessions");
  const list = element("session-names");
  element("sessions-note").textContent = [
    sessions.length ? `${sessions.length + others} sessions, the newest first.` : "There is no session.",
    others ? ` ${others} older ones are not listed.` : "",
  ].join("");
  const now = JSON.stringify(sessions);
  if (list.dataset.now !== now) {
    list.dataset.now = now;
    list.textContent = "";
    for (const each of sessions) {
      const button = make(make(list, "li"), "button", {type: "button", class: "session"}, sessionTitle(each));
      if (each.session === shownSession) button.setAttribute("aria-current", "true");
      button.addEventListener("click", act(async () => {
        mark(button, list.querySelectorAll("button"));
        shownSession = each.session;
        drawnTree = "";
        element("node-tokens").textContent = "";
        await showTree();
      }));
    }
  }
  if (shownSession && sessions.some(each => each.session === shownSession)) await showTree();
}

function sessionTitle(each) {
  const reward = each.reward === null ? "" : `, reward ${short(each.reward)}`;
  return `${each.session.slice(0, 12)} ${each.problem}: ${each.open ? "open" : "ended"}, ${each.turns} turns, ${each.sampled} tokens${reward}`;
}

async function showTree() {
  const name = shownSession, told = await ask("session", {name}), now = JSON.stringify(told);
  if (now === drawnTree || name !== shownSession) return;
  drawnTree = now;
  element("session-note").textContent = [
    `Session ${told.session}, floor ${told.floor}, ${told.open ? "open" : `ended: ${told.reason}`}.`,
    ` Turns ${told.turns}, answers ${told.answers}, conversations ${told.roots}, forks ${told.forks}, tokenised anew ${told.retokenised}.`,
    told.nodes_left_out ? ` ${told.nodes_left_out} nodes are not shown.` : "",
  ].join("");
  drawTree(told.nodes, name);
}

// Each node below its parent, indented by forks: a conversation without forks stays in one column.
function drawTree(nodes, name) {
  const list = element("session-tree"), children = new Map(nodes.map(node => [node.node, []]).concat([[-1, []]]));
  for (const node of nodes) (children.get(node.parent) || children.get(-1)).push(node);
  list.textContent = "";
  const waiting = children.get(-1).map(node => [node, 0]).reverse();
  while (waiting.length) {
    const [node, depth] = waiting.pop(), after = children.get(node.node);
    const css = node.kind === "answer" ? `answer${node.delivered ? "" : " undelivered"}` : "prompt";
    const item = make(list, "li", {style: `margin-left: ${Math.min(depth, 30) * 18}px`});
    const button = make(item, "button", {type: "button", class: css}, nodeTitle(node));
    button.addEventListener("click", act(async () => {
      mark(button, list.querySelectorAll("button"));
      const load = start => ask("node", {name, node: node.node, start});
      await new TokenView(element("node-tokens"), load, `up to ${node.kind} ${node.node}`).show();
    }));
    for (const child of [...after].reverse()) waiting.push([child, depth + (after.length > 1 ? 1 : 0)]);
  }
}

function nodeTitle(node) {
  if (node.kind === "prompt") return `${node.node} ${node.begins ? "begins" : node.anew ? "tokenised anew" : "continues"}, ${node.tokens} tokens, ${node.role}: ${node.preview}`;
  const told = [`${node.tokens} tokens (${spansText(node.versions)})`, node.stop_reason];
  if (node.mean_logprob !== null) told.push(`mean log-probability ${short(node.mean_logprob)}`);
  if (node.reward !== null) told.push(`reward ${short(node.reward)}`);
  if (!node.delivered) told.push("not delivered");
  return `${node.node} answer, ${told.join(", ")}: ${node.preview}`;
}
