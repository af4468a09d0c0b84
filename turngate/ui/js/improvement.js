/**
 * What training changed: rewards by kind of task, entropy, and the task that improved most, with an early and a late rollout.
 * `turngate/views/improvement.py` chooses the task and the rollouts.
 */

import { chart } from "./chart.js";
import { el, fill } from "./dom.js";
import { count, plural, score } from "./format.js";
import { messageOf } from "./message.js";
import { failed, loading } from "./notice.js";
import { Record } from "./record.js";
import { href } from "./router.js";
import { addressOf, facts, nameOf, rewardCell, state } from "./status.js";
import { line, table } from "./table.js";

/** @typedef {import("./api.js").Json} Json */

const MOST_TURNS = 12; // turns shown of each rollout

/** @param {Json} entropy */
export function entropyChart(entropy) {
  return chart({
    title: "Entropy by policy version",
    x: "version",
    whole: true,
    y: "nats per token",
    series: [
      { name: "entropy", points: entropy.versions.map((/** @type {Json} */ one) => [one.version, one.entropy]), shade: 3 },
    ],
    empty: "No ended rollout has log-probabilities.",
  });
}

/** @param {Json} improvement */
export function kindTable(improvement) {
  const { before, after, kinds } = improvement;
  /** @type {import("./table.js").Head[]} */
  const heads = [
    ["kind of task", ""],
    [versionsText(before), "num"],
    [versionsText(after), "num"],
    ["change", "num"],
  ];
  const cells = (/** @type {Json} */ one) => [
    one.kind || el("span.muted", { text: "unknown" }),
    meanCell(one.before),
    meanCell(one.after),
    one.before.mean === null || one.after.mean === null ? "–" : score(one.after.mean - one.before.mean, true),
  ];
  return el(
    "section.panel.kinds",
    null,
    el(
      "div.panel-head",
      null,
      el("h2", { text: "Reward by kind of task" }),
      el("span.muted", { text: "mean, in the first and the last third of the policy versions" }),
    ),
    el(
      "div.table-scroll",
      null,
      table(
        heads,
        kinds.map((/** @type {Json} */ one) => line(heads, cells(one))),
      ),
    ),
  );
}

/** @param {Json} of */
function meanCell(of) {
  const title = plural(of.graded, "rollout");
  return el("span", { title }, score(of.mean), el("span.muted", { text: ` (${count(of.graded)})` }));
}

/** @param {Json} span */
function versionsText(span) {
  return span.first === span.last ? `version ${span.first}` : `versions ${span.first}–${span.last}`;
}

/** A panel with a rollout of an early policy version and one of a late version. `draw` loads rollouts only if the pair has changed. */
export class BeforeAfter {
  constructor() {
    this.element = el("div.page-part");
    this.body = el("div.pair");
    this.drawn = "";
    this.rollouts = "";
  }

  /** @param {Json | null} improvement null before the second policy version */
  draw(improvement) {
    const wanted = JSON.stringify([improvement?.before, improvement?.after, improvement?.example]);
    if (wanted === this.drawn) return;
    this.drawn = wanted;
    fill(this.element, improvement && this.#panel(improvement));
  }

  /** @param {Json} improvement */
  #panel(improvement) {
    const { example } = improvement;
    const first = `the first third of the policy versions (${versionsText(improvement.before)})`;
    const last = `the last third (${versionsText(improvement.after)})`;
    if (!example) return panel("Before and after", `No task's mean reward rose from ${first} to ${last}.`);
    const { before, after } = example;
    const rollouts = JSON.stringify([before.rollout, after.rollout]);
    if (rollouts !== this.rollouts) {
      this.rollouts = rollouts;
      this.#load(before, after);
    }
    return panel(
      `Before and after: ${example.task}`,
      `The task whose mean reward rose most: from ${meanText(before)} in ${first} to ${meanText(after)} in ${last}. ` +
        "The rollouts below have the rewards closest to these means, among those of the first and the last policy version at which the " +
        `task was run (${before.version} and ${after.version}).`,
      el("p", null, el("a", { href: href(["compare", before.rollout, after.rollout]), text: "Compare them turn by turn" })),
      this.body,
    );
  }

  /** @param {Json} before @param {Json} after */
  async #load(before, after) {
    const chosen = this.rollouts;
    const sides = [new Record(before.rollout), new Record(after.rollout)];
    fill(this.body, loading());
    try {
      await Promise.all(
        sides.map(async (side) => {
          await side.load();
          await side.converse();
        }),
      );
      if (chosen !== this.rollouts) return; // other rollouts were chosen in the meantime
      fill(
        this.body,
        column("Before", before.version, sides[0]),
        column("After", after.version, sides[1]),
      );
    } catch (error) {
      if (chosen === this.rollouts)
        fill(
          this.body,
          failed(error, () => this.#load(before, after)),
        );
    }
  }
}

/** @param {Json} of */
function meanText(of) {
  return `${score(of.mean)} (${plural(of.graded, "rollout")})`;
}

/** @param {string} title @param {string} text @param {...any} content */
function panel(title, text, ...content) {
  return el(
    "section.panel.improvement",
    null,
    el("div.panel-head", null, el("h2", { text: title })),
    el("div.panel-body", null, el("p.muted", { text }), ...content),
  );
}

/** @param {string} label @param {number} version @param {Record} record */
function column(label, version, record) {
  const nodes = record.inOrder().flatMap((id) => record.messages.get(id) ?? []);
  const turns = nodes.filter((node) => node.kind === "sampled");
  const end = turns.length > MOST_TURNS ? nodes.indexOf(turns[MOST_TURNS - 1]) + 1 : nodes.length;
  const messages = nodes.slice(0, end).flatMap((node) => node.messages);
  return el(
    "section.panel.side",
    { "aria-label": `${label}: version ${version}` },
    el(
      "div.view-head",
      null,
      el("h3", null, `${label}: `, el("a", { href: addressOf(record.id), text: nameOf(record.row) })),
      state(record.row),
    ),
    facts([
      ["reward", rewardCell(record.row.reward)],
      ["version", String(version)],
      ["turns", count(record.row.turns)],
    ]),
    ...messages.map((/** @type {Json} */ message) => messageOf(message, null)),
    end < nodes.length &&
      el("a.more", { href: addressOf(record.id), text: plural(turns.length - MOST_TURNS, "more turn") }),
  );
}
