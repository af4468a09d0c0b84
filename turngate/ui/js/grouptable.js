/** The rollouts of a group as a table: rewards, advantages, and facts from their traces. */

import { el } from "./dom.js";
import { count, duration, number, score } from "./format.js";
import { empty } from "./notice.js";
import { addressOf, nameOf, rewardCell, state } from "./status.js";
import { line, table } from "./table.js";

/** @typedef {import("./api.js").Json} Json */

/** @type {import("./table.js").Head[]} */
const HEADS = [
  ["", ""],
  ["rollout", ""],
  ["status", ""],
  ["reward", "num"],
  ["advantage", "num"],
  ["leave one out", "num"],
  ["turns", "num"],
  ["sampled", "num"],
  ["entropy", "num"],
  ["forks", ""],
  ["took", "num"],
];

/**
 * @param {Json} group
 * @param {{evidence: Map<string, Json>, picked: string[], at: number, pick: (id: string) => void}} how `evidence` has facts from
 *   the traces, `picked` the rollouts to compare, and `at` the row selected by keyboard
 */
export function rolloutsOf(group, { evidence, picked, at, pick }) {
  if (!group.rollouts.length) {
    return empty("No rollouts in this group yet", "They appear as soon as a runner starts them.");
  }
  const largest = Math.max(...group.rollouts.map((/** @type {Json} */ row) => Math.abs(row.advantage ?? 0)), 0.001);
  const made = group.rollouts.map((/** @type {Json} */ row, /** @type {number} */ i) => {
    const known = evidence.get(row.id);
    const name = nameOf(row);
    const box = el("input", { type: "checkbox", "aria-label": `Compare ${name}`, on: { change: () => pick(row.id) } });
    box.checked = picked.includes(row.id);
    const cells = [
      box,
      el("a", { href: addressOf(row.id), title: `${name} (${row.id})`, text: within(group.group, name) }),
      state(row),
      rewardCell(row.reward),
      advantage(row.advantage, largest),
      score(row.leave_one_out, true),
      count(row.turns),
      count(row.sampled_tokens),
      el("span", { title: known?.error, text: known ? number(known.entropy) : "…" }),
      known ? forks(known.forks) : "…",
      duration(row.seconds),
    ];
    return line(HEADS, cells, i === at ? "is-selected" : "");
  });
  return table(HEADS, made);
}

/** @param {Object<string, number>} causes */
function forks(causes) {
  const parts = Object.entries(causes).map(([cause, n]) => `${cause} ${n}`);
  return parts.join(", ") || "none";
}

/** Return a rollout's name without the group's name. @param {string} group @param {string} name */
function within(group, name) {
  return name.startsWith(`${group}.`) ? `rollout ${name.slice(group.length + 1)}` : name;
}

/** @param {number | null} value @param {number} largest */
function advantage(value, largest) {
  if (value === null) return el("span.muted", { text: "–" });
  const bar = el("span.advantage-bar", { class: value < 0 ? "is-minus" : "" });
  bar.style.width = `${(Math.abs(value) / largest) * 100}%`;
  const number = el("span.advantage-number", { text: score(value, true) });
  return el("span.advantage", null, el("span", null, value < 0 && bar), el("span", null, value >= 0 && bar), number);
}
