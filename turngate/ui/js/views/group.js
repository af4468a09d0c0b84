/** One group: n rollouts of one task, their rewards and advantages, pass@k, entropy, and the causes of drift in their traces. */

import { exportOfGroup } from "../actions.js";
import * as api from "../api.js";
import { chart } from "../chart.js";
import { el, fill } from "../dom.js";
import { count, number, percent, plural, score, when } from "../format.js";
import { rolloutsOf } from "../grouptable.js";
import { failed, loading } from "../notice.js";
import { Paced } from "../paced.js";
import { go, href } from "../router.js";
import { addressOf, facts } from "../status.js";

/** @typedef {import("../api.js").Json} Json */

const LATER_MS = 1000; // changes within this time are fetched together
const AGAIN_MS = 10000; // between two reads of the traces of a running group

/**
 * @param {import("../router.js").Place} place
 * @returns {import("../main.js").View}
 */
export function show(place) {
  const name = place.parts[0] ?? "";
  const element = el("div.page", null, loading());
  const traces = el("div", null, loading());
  /** @type {Json | null} */
  let group = null;
  /** @type {Map<string, Json>} facts from each rollout's trace */
  const evidence = new Map();
  /** @type {string[]} the rollouts selected for comparison, at most two */
  let picked = [];
  let at = -1;
  const tableBox = el("div.table-scroll");
  const compare = el("button.button", { type: "button", on: { click: openCompare } });

  function openCompare() {
    if (picked.length === 2) go(href(["compare", picked[0], picked[1]]));
  }

  function drawTable() {
    compare.textContent = picked.length === 2 ? "Compare" : `Compare (select ${2 - picked.length})`;
    compare.disabled = picked.length !== 2;
    if (group) fill(tableBox, rolloutsOf(group, { evidence, picked, at, pick }));
  }

  /** @param {string} id */
  function pick(id) {
    picked = picked.includes(id) ? picked.filter((one) => one !== id) : [...picked, id].slice(-2);
    drawTable();
  }

  /** @param {number} by */
  function step(by) {
    if (!group) return;
    at = Math.max(0, Math.min(group.rollouts.length - 1, at + by));
    drawTable();
    tableBox.querySelector("tr.is-selected")?.scrollIntoView({ block: "nearest" });
  }

  const here = () => group?.rollouts[at];

  const quick = new Paced(async () => {
    const first = !group;
    try {
      group = await api.group(name);
    } catch (error) {
      if (!first) return api.passOver(error);
      return fill(
        element,
        failed(error, () => quick.now()),
      );
    }
    drawTable();
    fill(element, ...layout(group, tableBox, compare, traces));
    if (first) slow.now();
    else slow.soon();
  }, LATER_MS);

  const slow = new Paced(async () => {
    try {
      const got = await api.evidence(name);
      for (const one of got.rollouts) evidence.set(one.id, one);
      drawTable();
      fill(traces, evidenceOf(got));
    } catch (error) {
      if (evidence.size) return api.passOver(error);
      fill(
        traces,
        failed(error, () => slow.now()),
      );
    }
  }, AGAIN_MS);

  quick.now();
  return {
    element,
    title: name,
    keys: [
      { key: "j", does: "next rollout", run: () => step(1) },
      { key: "k", does: "previous rollout", run: () => step(-1) },
      { key: "Enter", does: "open the rollout", run: () => here() && go(addressOf(here().id)) },
      { key: " ", does: "select for comparison", run: () => here() && pick(here().id) },
      { key: "c", does: "compare the selected rollouts", run: openCompare },
      { key: "e", does: "export", run: () => exportOfGroup(name) },
    ],
    changed: (changes) => {
      if (!changes.reload && !changes.rollouts.some((row) => row.group === name)) return;
      quick.soon();
    },
    leave: () => {
      quick.leave();
      slow.leave();
    },
  };
}

/** @param {Json} group @param {Node} table @param {Node} compare @param {Node} traces */
function layout(group, table, compare, traces) {
  const running = group.rollouts.filter(
    (/** @type {Json} */ row) => !["done", "cancelled"].includes(row.status),
  ).length;
  const rewards = group.rollouts.map((/** @type {Json} */ row, /** @type {number} */ i) => [i + 1, row.reward]);
  return [
    el("div.crumbs", null, el("a", { href: href(["groups"]), text: "Groups" })),
    el(
      "div.view-head",
      null,
      el("h1", { text: group.group }),
      el(
        "div.actions",
        null,
        compare,
        el("button.button", { type: "button", text: "Export", on: { click: () => exportOfGroup(group.group) } }),
      ),
    ),
    facts([
      ["task", group.task || "–"],
      ["rollouts", [count(group.rollouts.length), running ? el("small", { text: ` (${running} running)` }) : ""]],
      ["graded", count(group.graded)],
      ["passed", count(group.passed)],
      [
        "mean reward",
        [
          score(group.mean_reward),
          el("small", { text: group.std_reward === null ? "" : ` ± ${score(group.std_reward)}` }),
        ],
      ],
      ["pass@1", percent(group.pass_at[0]?.estimate)],
      [
        "signal",
        group.signal === null
          ? "–"
          : group.signal
            ? el("span.good", { text: "rewards differ" })
            : el("span.warn", { text: "all equal" }),
        "Whether the rewards of rollouts with trainable tokens differ. If they do not, a trainer cannot learn from the group.",
      ],
      [
        "delivered",
        group.deliveries.length
          ? group.deliveries.map((/** @type {Json} */ d) =>
              el("span", { title: `feed ${d.feed}` }, `#${d.number} `, when(d.at)),
            )
          : "–",
      ],
    ]),
    el("section.panel", { "aria-label": "Rollouts" }, table),
    el(
      "div.charts",
      null,
      chart({
        title: "Rewards",
        x: "rollout",
        whole: true,
        y: "reward",
        series: [{ name: "reward", points: rewards, kind: "bars" }],
        yRange: range(rewards),
        empty: "No rewards yet.",
      }),
      chart({
        title: "pass@k",
        x: "k",
        whole: true,
        y: "estimate",
        series: [{ name: "pass@k", points: group.pass_at.map((/** @type {Json} */ p) => [p.k, p.estimate]) }],
        yRange: [0, 1],
        yText: (v) => percent(v),
        empty: "No graded rollouts yet.",
      }),
    ),
    traces,
  ];
}

/** Return the range 0 to 1, or a wider one if the rewards need it. @param {[number, number | null][]} points @returns {[number, number]} */
function range(points) {
  const known = points.map((p) => p[1] ?? 0);
  return [Math.min(0, ...known), Math.max(1, ...known)];
}

/** @param {Json} got */
function evidenceOf(got) {
  const most = Math.max(...got.drift.map((/** @type {Json} */ one) => one.tokens), 1);
  const cells = got.drift.flatMap((/** @type {Json} */ one) => {
    const bar = el("span");
    bar.style.width = `${(one.tokens / most) * 100}%`;
    return [
      el("dt", { text: one.cause }),
      el("dd.bar-track", { "aria-hidden": "true" }, bar),
      el("dd", {
        text: `${plural(one.tokens, "token")}, ${plural(one.forks, "fork")} in ${plural(one.rollouts, "rollout")}`,
      }),
    ];
  });
  const drift = got.drift.length
    ? el("dl.bars", null, ...cells)
    : el("p.muted", { text: "No forks: every conversation is a single branch." });
  const points = got.rollouts.map((/** @type {Json} */ one, /** @type {number} */ i) => [i + 1, one.entropy]);
  return el(
    "div.charts",
    null,
    chart({
      title: `Entropy: ${number(got.entropy)} nats over ${plural(got.entropy_tokens, "token")}`,
      x: "rollout",
      whole: true,
      y: "nats per token",
      series: [{ name: "entropy", points, kind: "bars", shade: 3 }],
      empty: "No log-probabilities.",
    }),
    el(
      "section.panel",
      null,
      el(
        "div.panel-head",
        null,
        el("h2", { text: "Drift by cause" }),
        el("span.muted", { text: "context tokens that were stored again" }),
      ),
      el("div.panel-body", null, drift),
    ),
  );
}
