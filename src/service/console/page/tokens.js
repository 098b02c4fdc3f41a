"use strict";
// Tokens of a rollout or a session: what was observed, and what was sampled by which version with which probability.

const LIKELY = -0.1, UNLIKELY = -1.5, VERSION_COLORS = 6;

function likelihood(logprob) {
  return logprob > LIKELY ? "likely" : logprob > UNLIKELY ? "less" : "surprise";
}

// Yields the version of each sampled token of a piece.
function* versionsOf(piece) {
  for (const [version, count] of piece.versions) for (let i = 0; i < count; i++) yield version;
}

// A reader of pages of tokens in `parent`. `load(start)` asks for a page; `about` says what the tokens are of.
class TokenView {
  constructor(parent, load, about) {
    this.load = load;
    parent.textContent = "";
    const bar = make(parent, "div", {class: "buttons"});
    make(bar, "strong", {}, about);
    this.mode = make(make(bar, "label", {}, "colour by "), "select", {class: "mode"});
    for (const mode of ["log-probability", "version", "age", "one token a line"]) make(this.mode, "option", {}, mode);
    this.mode.value = TokenView.mode;
    this.back = make(bar, "button", {type: "button"}, "◀");
    this.place = make(bar, "span", {class: "note"});
    this.on = make(bar, "button", {type: "button"}, "▶");
    this.legend = make(parent, "p", {class: "note"});
    this.box = make(parent, "div", {class: "tokens", tabindex: 0});
    this.mode.addEventListener("change", () => { TokenView.mode = this.mode.value; this.draw(); });
    this.on.addEventListener("click", act(() => this.show(this.page.next)));
    this.back.addEventListener("click", act(() => this.show(Math.max(0, this.page.start - this.size))));
  }

  async show(start = 0) {
    this.page = await this.load(start);
    this.size = this.page.next === null ? this.size || this.page.total : this.page.next - this.page.start;
    this.draw();
  }

  draw() {
    const {start, next, total, pieces, step, floor} = this.page;
    this.place.textContent = `tokens ${total ? start + 1 : 0} to ${next ?? total} of ${total}`;
    this.back.disabled = start === 0;
    this.on.disabled = next === null;
    const spans = pieces.flatMap(piece => piece.versions || []);
    this.versions = [...new Set(spans.map(([version]) => version))].sort((a, b) => a - b);
    this.newest = step ?? this.versions[this.versions.length - 1] ?? 0;
    this.legend.textContent = {
      "log-probability": `Green is likely, yellow below ${LIKELY}, red below ${UNLIKELY}. Grey was observed.`,
      "version": `Sampled here by version ${this.versions.join(", ") || "none"}. Grey was observed.`,
      "age": step === undefined ? `Age = newest version here (${this.newest}) − version; the floor is ${floor}.`
        : `Age = version trained on (${step}) − version; the floor of the group is ${floor}.`,
      "one token a line": "Number, token, text, log-probability, version.",
    }[this.mode.value];
    this.box.textContent = "";
    let place = start;
    for (const piece of pieces) {
      if (piece.kind === "observed") make(this.box, "span", {class: "observed"}, piece.text ?? piece.tokens.join(" ") + " ");
      else if (this.mode.value === "one token a line") this.drawLines(piece, place);
      else this.drawTokens(piece);
      if (piece.note) make(this.box, "span", {class: "said"}, piece.note);
      place += piece.tokens.length;
    }
  }

  drawTokens(piece) {
    const versions = [...versionsOf(piece)];
    if (!piece.texts && piece.text !== undefined) return make(this.box, "span", {}, piece.text);
    piece.tokens.forEach((token, i) => {
      const css = {
        "log-probability": likelihood(piece.logprobs[i]),
        "version": `v${this.versions.indexOf(versions[i]) % VERSION_COLORS}`,
        "age": `v${Math.min(this.newest - versions[i], VERSION_COLORS - 1)}`,
      }[this.mode.value];
      const shown = make(this.box, "b", {class: css}, piece.texts ? piece.texts[i] : `${token} `);
      const said = [`token ${token}`, `log-probability ${piece.logprobs[i]}`, `version ${versions[i]}`, `age ${this.newest - versions[i]}`];
      shown.addEventListener("pointermove", event => showTip(event, said.join("\n")));
      shown.addEventListener("pointerleave", event => showTip(event, ""));
    });
    return null;
  }

  drawLines(piece, place) {
    const table = make(this.box, "table", {class: "token-table"}), versions = [...versionsOf(piece)];
    piece.tokens.forEach((token, i) => {
      const line = make(table, "tr"), text = piece.texts ? JSON.stringify(piece.texts[i]) : "";
      for (const cell of [place + i + 1, token]) make(line, "td", {}, cell);
      make(make(line, "td"), "b", {class: likelihood(piece.logprobs[i])}, text);
      for (const cell of [piece.logprobs[i].toFixed(4), `version ${versions[i]}`]) make(line, "td", {}, cell);
    });
  }
}
TokenView.mode = "log-probability";
