/** The details of one token, and the legend of the colors. */

import { STEPS, stepOf } from "./probability.js";
import { el } from "./dom.js";
import { count, number, percent } from "./format.js";
import { causeBadge, roleBadge } from "./status.js";
import { visible } from "./text.js";

/**
 * @param {import("./tokenlines.js").TokenLines} tokens
 * @param {number} at
 * @returns {Node[]}
 */
export function detailOf(tokens, at) {
  const held = tokens.heldOf(at);
  if (!held) return [];
  const { node } = held;
  const sampled = node.kind === "sampled";
  const logprob = tokens.logprobs[at];
  const inside = at - held.first;
  /** @type {[string, any][]} */
  const pairs = [
    [
      "id",
      `${tokens.ids[at]}${tokens.special.has(at) ? " (special)" : tokens.parts.has(at) ? " (part of a character)" : ""}`,
    ],
    ["log-probability", sampled ? (logprob === null ? "unknown" : number(logprob, 5)) : "– (context)"],
    ["probability", sampled && logprob !== null ? percent(Math.exp(logprob)) : "–"],
    [
      "position",
      `token ${count(inside)} of ${sampled ? `turn ${node.turn}` : "this context"}, ${count(node.start + inside)} from the root`,
    ],
    ["kind", sampled ? "sampled by the model" : "context: sent to the model"],
    ["trained", trained(node)],
  ];
  if (sampled) {
    pairs.push(
      ["role", roleBadge(node)],
      ["role decided by", node.evidence],
      [
        "policy",
        node.version_start === node.version_end
          ? `v${node.version_start}`
          : `v${node.version_start} at the turn's first token, v${node.version_end} at its last`,
      ],
      ["capture", node.capture],
    );
    if (node.biases?.length) {
      const biases = node.biases.join(", ");
      pairs.push(node.masked ? ["truncated by", `${biases}; trained with sampling masks`] : ["biased by", biases]);
    }
    if (node.fault) pairs.push(["fault", node.fault]);
  }
  if (node.cause) pairs.push(["fork", causeBadge(node.cause)]);
  const parts = [el("code.token-big", { text: visible(tokens.texts[at]) || "(no text)" })];
  if (sampled && logprob !== null) parts.push(meter(Math.exp(logprob)));
  parts.push(
    el("dl.pairs", null, ...pairs.flatMap(([name, value]) => [el("dt", { text: name }), el("dd", null, value)])),
  );
  return parts;
}

/** @param {import("./api.js").Json} node */
function trained(node) {
  if (node.kind !== "sampled") return "no: it was not sampled";
  return node.trained ? `yes, in row ${node.row}` : `no: ${node.reason || "not in any row"}`;
}

/** @param {number} share */
function meter(share) {
  const fill = el("span.meter-fill");
  fill.style.width = `${share * 100}%`;
  return el("span.meter", { role: "img", "aria-label": `probability ${percent(share)}` }, fill);
}

/**
 * Create a summary of the loaded tokens: how many were sampled, and how likely they were.
 * @param {import("./tokenlines.js").TokenLines} tokens
 * @returns {Node[]}
 */
export function summaryOf(tokens) {
  const counts = STEPS.map(() => 0);
  let [known, sum, sampled, trained] = [0, 0, 0, 0];
  for (const held of tokens.nodes) {
    if (held.node.kind !== "sampled") continue;
    sampled += held.past - held.first;
    if (held.node.trained) trained += held.past - held.first;
    for (let i = held.first; i < held.past; i++) {
      const logprob = tokens.logprobs[i];
      if (logprob === null) continue;
      known += 1;
      sum += logprob;
      counts[Number(stepOf(logprob).slice(1))] += 1;
    }
  }
  const bars = STEPS.flatMap((step, i) => {
    const bar = el("span", { class: `fill-${i}` });
    bar.style.width = `${known ? (counts[i] / known) * 100 : 0}%`;
    return [
      el("dt", { text: step.label }),
      el("dd.bar-track", { "aria-hidden": "true" }, bar),
      el("dd.num", { text: percent(known ? counts[i] / known : null) }),
    ];
  });
  return [
    el("h3", { text: "This branch" }),
    el(
      "dl.pairs",
      null,
      el("dt", { text: "sampled" }),
      el("dd", { text: `${count(sampled)} of ${count(tokens.count)} tokens` }),
      el("dt", { text: "trained" }),
      el("dd", { text: count(trained) }),
      el("dt", { text: "mean log-probability" }),
      el("dd", { text: known ? number(sum / known) : "–" }),
    ),
    el("dl.bars.spread-of", { "aria-label": "Sampled tokens by probability" }, ...bars),
  ];
}

/** Create the legend of colors and lines. */
export function legend() {
  const scale = el("span.legend-scale", {
    role: "img",
    "aria-label": "From no color (at least 90 %) to the strongest color (less than 0.5 %)",
  });
  STEPS.forEach((step, i) =>
    scale.append(el("span.t", { class: `p${i}`, title: `probability ${step.label}`, text: step.label })),
  );
  return el(
    "ul.legend",
    { "aria-label": "Legend" },
    el("li", null, "probability ", scale),
    el("li", null, el("span.t.is-sampled.is-trained", { text: "sampled" }), "trained"),
    el("li", null, el("span.t.is-sampled", { text: "sampled" }), "not trained"),
    el("li", null, el("span.t.is-context", { text: "context" }), "sent"),
    el("li", null, el("span.t.is-sampled", { class: stepOf(null), text: "     " }), "unknown"),
  );
}
