/** Badges and cells for states, classes, rewards and names of rollouts, in all views. None relies on color alone. */

import { el, svg } from "./dom.js";
import { score } from "./format.js";
import { href } from "./router.js";

/** @typedef {import("./api.js").Json} Json */

/** @type {Object<string, [string, string]>} tone and sign */
const STATUS = {
  starting: ["is-live", "◔"],
  running: ["is-live", "●"],
  finishing: ["is-live", "◕"],
  done: ["", "■"],
  cancelled: ["is-warn", "⊘"],
};

/** @type {Object<string, [string, string]>} */
const CLASS = {
  graded: ["is-good", "✓"],
  "agent failed": ["is-warn", "!"],
  "invalid task": ["is-bad", "?"],
  "infrastructure fault": ["is-bad", "✕"],
};

/** @type {Object<string, [string, string]>} */
const ROLE = {
  main: ["is-live", ""],
  subagent: ["is-good", ""],
  side: ["", ""],
  summary: ["", ""],
  unknown: ["is-warn", "?"],
  superseded: ["is-warn", ""],
  aborted: ["is-bad", ""],
};

/**
 * @param {string} text
 * @param {[string, string]} look
 * @param {string} [title]
 */
function badge(text, look, title) {
  const sign = look[1] && el("span.badge-sign", { "aria-hidden": "true", text: look[1] });
  return el("span.badge", { class: look[0], title }, sign, text);
}

/** Create a badge for a rollout's state: its stage while it runs, then its class. @param {Json} row */
export function state(row) {
  if (row.excluded) {
    const name = row.excluded.startsWith("superseded") ? "superseded" : "not counted";
    return badge(row.class ? `${row.class} · ${name}` : name, ["is-warn", "⊘"], row.excluded);
  }
  if (row.status === "done" && row.class && row.warning) return badge(row.class, ["is-warn", "⚠"], row.warning);
  if (row.status === "done" && row.class) {
    const failedGrade = row.class === "graded" && !passed(row);
    return badge(row.class, failedGrade ? ["", "✓"] : (CLASS[row.class] ?? ["", ""]), row.message);
  }
  const text =
    row.status !== "done" && row.status !== "cancelled" && row.stage ? `${row.status} · ${row.stage}` : row.status;
  return badge(text, STATUS[row.status] ?? ["", ""], row.stop);
}

/** @param {string} name */
export function classBadge(name) {
  return badge(name, CLASS[name] ?? STATUS[name] ?? ["", ""]);
}

/** Create a badge for the role of a turn, with the evidence that decided it. @param {Json} turn */
export function roleBadge(turn) {
  return badge(turn.role, ROLE[turn.role] ?? ["", ""], turn.evidence && `decided by ${turn.evidence}`);
}

/** Describe the reward of a turn, such as `reward +0.50 plan`. @param {Json} reward */
export function rewardText(reward) {
  return `reward ${score(reward.value, true)}${reward.name ? ` ${reward.name}` : ""}`;
}

/** Create a label for the reward of a turn. @param {Json} reward */
export function rewardLabel(reward) {
  const kind = reward.kind === "part" ? "a part of the rollout's reward" : "in addition to the rollout's reward";
  const call = reward.call === undefined ? "" : `, for host-tool call ${reward.call}`;
  const last = reward.end - 1;
  const tokens = reward.start === last ? `token ${last}` : `tokens ${reward.start} to ${last}`;
  const span = reward.end === undefined ? "" : `, for ${tokens} of the turn`;
  return el("span.turn-reward", { title: kind + call + span, text: rewardText(reward) });
}

/** Create a badge for the cause of a fork. @param {string} cause */
export function causeBadge(cause) {
  const sign = svg(
    "svg.fork-sign",
    { viewBox: "0 0 10 12", "aria-hidden": "true" },
    svg("path", { d: "M2 11V1M2 8C2 5 8 7 8 2" }),
  );
  return el("span.badge.is-warn", { title: `fork: ${cause}` }, sign, cause);
}

/** Return whether a rollout passed: its grader's verdict or, without one, whether its reward is at least 1. @param {Json} row */
export function passed(row) {
  return row.resolved ?? (row.reward !== null && row.reward >= 1);
}

/** Return whether a rollout is still running. @param {Json} row */
export function lives(row) {
  return row.status === "starting" || row.status === "running" || row.status === "finishing";
}

/** Create a cell with a reward and a bar, or a dash if the reward is unknown. @param {number | null} reward */
export function rewardCell(reward) {
  if (reward === null) return el("span.reward.muted", { title: "no reward", text: "–" });
  const bar = el("span.reward-bar", { "aria-hidden": "true" }, el("span"));
  /** @type {HTMLElement} */ (bar.firstElementChild).style.width = `${Math.max(0, Math.min(1, reward)) * 100}%`;
  return el("span.reward", { title: String(reward) }, bar, score(reward));
}

/** Format the policy versions that sampled a rollout. @param {Json} row */
export function versions(row) {
  if (row.version_start === null || row.version_start === undefined) return "–";
  return row.version_start === row.version_end ? `v${row.version_start}` : `v${row.version_start}–${row.version_end}`;
}

/** @param {Json} row */
export function nameOf(row) {
  return row.name || row.id;
}

/** @param {string} id @param {string} [tab] */
export function addressOf(id, tab = "") {
  return href(tab ? ["rollout", id, tab] : ["rollout", id]);
}

/**
 * Create a list of labeled values, which is shown above a view.
 * @param {[string, any, string?][]} pairs label, value and tooltip
 */
export function facts(pairs) {
  return el(
    "dl.facts",
    null,
    ...pairs.map(([label, value, title]) =>
      el("div.fact", { title }, el("dt", { text: label }), el("dd", null, value)),
    ),
  );
}
