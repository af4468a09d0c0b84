/** Draw a line of tokens, and the header line of a node. */

import { stepOf } from "./probability.js";
import { el } from "./dom.js";
import { number, plural } from "./format.js";
import { causeBadge, roleBadge } from "./status.js";
import { visible } from "./text.js";

const PLAIN = /^ ?[\x21-\x7e]*$/; // shown unchanged

/**
 * @param {import("./tokenlines.js").TokenLines} tokens
 * @param {import("./tokenlines.js").Line} line
 * @param {number} selected
 */
export function lineOf(tokens, line, selected) {
  const { node } = line.held;
  const made = el("div.token-line", { role: "row" });
  for (let i = line.from; i < line.to; i++) {
    const kind = node.kind === "sampled" ? `is-sampled ${stepOf(tokens.logprobs[i])}` : "is-context";
    const chosen = i === selected;
    const part = tokens.parts.has(i) ? "is-part" : "";
    const look = `${kind} ${part} ${node.trained ? "is-trained" : ""} ${chosen ? "is-selected" : ""}`;
    const text = tokens.texts[i];
    const shown = PLAIN.test(text) ? text : visible(text).replaceAll("·", " ");
    made.append(
      el("span.t", { role: "gridcell", class: look, id: chosen ? "token-selected" : null, data: { i }, text: shown }),
    );
  }
  return made;
}

/**
 * @param {import("./tokenlines.js").Held} held
 * @param {number | null} mean its mean log-probability
 */
export function headOf(held, mean) {
  const { node } = held;
  const fold = el("button.icon", {
    type: "button",
    "aria-expanded": String(!held.folded),
    "aria-label": held.folded ? "Unfold" : "Fold",
    data: { fold: node.id },
    text: held.folded ? "▸" : "▾",
  });
  const extra = node.kind === "sampled" ? sampled(node, mean) : [];
  return el(
    "div.token-line.token-head",
    { role: "row" },
    fold,
    el("strong", { text: node.kind === "sampled" ? `Turn ${node.turn}` : "Context" }),
    node.cause && causeBadge(node.cause),
    el("span", { text: plural(node.tokens, "token") }),
    ...extra,
  );
}

/** @param {import("./api.js").Json} node @param {number | null} mean */
function sampled(node, mean) {
  const { version_start: first, version_end: last } = node;
  return [
    roleBadge(node),
    el("span", {
      text: node.trained ? `trained in row ${node.row}` : `not trained: ${node.reason || "not in any row"}`,
    }),
    el("span", { text: first === last ? `policy v${first}` : `policy v${first}–${last}` }),
    mean !== null && el("span.wide-only", { text: `mean log-probability ${number(mean)}` }),
  ];
}
