/**
 * Training progress: rewards by time, version, step or kind of task; an early and a late rollout; staleness; throughput; entropy;
 * how the trainer's log-probabilities differ from the engine's; and the state of each feed.
 */

import * as api from "../api.js";
import { chart } from "../chart.js";
import { el, fill } from "../dom.js";
import { chips, searchField } from "../filters.js";
import { deliveries, feeds } from "../feedtables.js";
import { BeforeAfter, entropyChart, kindTable } from "../improvement.js";
import { alarms, mismatchCharts } from "../mismatch.js";
import { empty, failed, loading } from "../notice.js";
import { Paced } from "../paced.js";
import { href, note } from "../router.js";

/** @typedef {import("../api.js").Json} Json */

const AGAIN_MS = 5000; // how often the view is reloaded while things change
const ENTROPY_MS = 30000; // how often the entropy is reloaded; each reload reads traces

/**
 * @param {import("../router.js").Place} place
 * @returns {import("../main.js").View}
 */
export function show(place) {
  const wanted = { group: "", by: "time", ...place.query };
  const body = el("div.page-part", null, loading());
  const tables = el("div.page-part");
  const beforeAfter = new BeforeAfter(); // not redrawn with the rest, so that the user can read it
  /** @type {Json | null} */
  let got = null;
  /** @type {Json | null} */
  let entropy = null;

  function draw() {
    if (!got) return;
    const open = [...body.querySelectorAll("details")].map((/** @type {HTMLDetailsElement} */ one) => one.open);
    fill(body, ...drawn(got, wanted.by, entropy));
    beforeAfter.draw(got.improvement);
    fill(tables, got.feeds.length > 0 && feeds(got.feeds), got.deliveries.length > 0 && deliveries(got.deliveries));
    body.querySelectorAll("details").forEach((/** @type {HTMLDetailsElement} */ one, /** @type {number} */ i) => {
      one.open = open[i] ?? false; // keep opened tables open
    });
  }

  const load = new Paced(async () => {
    try {
      got = await api.training({ group: wanted.group, buckets: 120 });
      draw();
    } catch (error) {
      if (got) return api.passOver(error);
      fill(
        body,
        failed(error, () => load.now()),
      );
    }
  }, AGAIN_MS);

  const loadEntropy = new Paced(async () => {
    try {
      entropy = await api.entropy({ group: wanted.group });
      draw();
    } catch (error) {
      api.passOver(error); // the chart is missing until the next load
    }
  }, ENTROPY_MS);

  /** @param {Object<string, string>} what */
  function change(what) {
    Object.assign(wanted, what);
    note(href(["training"], { group: wanted.group, by: wanted.by === "time" ? "" : wanted.by }));
  }

  const search = searchField(wanted.group, "Groups starting with", (group) => {
    change({ group });
    entropy = null;
    load.now();
    loadEntropy.now();
  });
  const by = chips(
    "Reward by",
    [
      ["time", "By time"],
      ["version", "By version"],
      ["step", "By step"],
    ],
    wanted.by,
    (value) => {
      change({ by: value });
      draw();
    },
  );
  load.now();
  loadEntropy.now();
  return {
    element: el(
      "div.page",
      null,
      el("div.view-head", null, el("h1", { text: "Training" })),
      el("div.toolbar", { role: "search" }, by, search),
      body,
      beforeAfter.element,
      tables,
    ),
    title: "Training",
    keys: [{ key: "/", does: "filter by group", run: () => search.focus() }],
    changed: () => {
      load.soon();
      loadEntropy.soon();
    },
    leave: () => {
      load.leave();
      loadEntropy.leave();
    },
  };
}

/** @param {Json} got @param {string} by @param {Json | null} entropy */
function drawn(got, by, entropy) {
  if (!got.time.length && !got.throughput.some((/** @type {Json} */ one) => one.turns_s)) {
    return [
      empty(
        "No training data yet",
        "Throughput appears with the first turns, rewards with the first graded rollouts. Start with turngate train or turngate batch.",
      ),
    ];
  }
  const clockText = timeText(got.first ?? got.now, got.now);
  return [
    ...alarms(got.mismatch),
    el(
      "div.charts",
      null,
      reward(got, by, clockText),
      chart({
        title: "Staleness of rollouts",
        x: "versions behind",
        whole: true,
        y: "rollouts",
        series: [
          {
            name: "rollouts",
            kind: "bars",
            points: got.staleness.map((/** @type {Json} */ s) => [s.behind, s.rollouts]),
            shade: 1,
          },
        ],
        empty: "No finished rollout has policy versions.",
      }),
      chart({
        title: "Tokens sampled",
        x: "time",
        y: "tokens/s",
        clock: true,
        xText: clockText,
        series: [
          { name: "tokens/s", points: got.throughput.map((/** @type {Json} */ t) => [t.at, t.tokens_s]), shade: 2 },
        ],
      }),
      chart({
        title: "Turns and rollouts",
        x: "time",
        y: "per minute",
        clock: true,
        xText: clockText,
        series: [
          {
            name: "turns/min",
            points: got.throughput.map((/** @type {Json} */ t) => [t.at, t.turns_s === null ? null : t.turns_s * 60]),
            shade: 0,
          },
          {
            name: "rollouts/min",
            points: got.throughput.map((/** @type {Json} */ t) => [t.at, t.rollouts_min]),
            shade: 1,
          },
        ],
      }),
      got.deliveries.length > 0 &&
        chart({
          title: "Staleness of deliveries",
          x: "delivery",
          whole: true,
          y: "versions behind",
          wholeY: true,
          series: [
            {
              name: "behind",
              kind: "dots",
              points: got.deliveries.map((/** @type {Json} */ d) => [d.number, d.behind]),
              shade: 3,
            },
          ],
        }),
      entropy && entropyChart(entropy),
      ...(got.mismatch.newest.length > 0 ? mismatchCharts(got.mismatch) : []),
    ),
    got.improvement?.kinds.length > 0 && kindTable(got.improvement),
  ];
}

/** @param {Json} got @param {string} by @param {(value: number) => string} clockText */
function reward(got, by, clockText) {
  if (by === "version") {
    const points = got.version.map((/** @type {Json} */ one) => [one.version, one.mean]);
    const series = [{ name: "mean reward", points }];
    const empty = "No graded rollout has a policy version.";
    return chart({ title: "Reward by policy version", x: "version", whole: true, y: "mean reward", series, empty });
  }
  if (by === "step") {
    const points = got.deliveries.map((/** @type {Json} */ one) => [one.number, one.mean]);
    const empty = "No deliveries yet: create a feed and read it from a trainer.";
    return chart({
      title: "Reward by step",
      x: "delivery",
      whole: true,
      y: "mean reward",
      series: smooth(points),
      empty,
    });
  }
  const points = got.time.map((/** @type {Json} */ one) => [one.at, one.mean]);
  const empty = "No rewards yet.";
  return chart({
    title: "Reward",
    x: "time",
    clock: true,
    xText: clockText,
    y: "mean reward",
    series: smooth(points),
    empty,
  });
}

/**
 * Return the points and their exponential moving average, with weight 0.25.
 * @param {import("../chart.js").Point[]} points
 * @returns {import("../chart.js").Series[]}
 */
function smooth(points) {
  if (points.length < 8) return [{ name: "mean reward", points }];
  /** @type {number | null} */
  let mean = null;
  const moving = points.map(([at, value]) => {
    if (value !== null) mean = mean === null ? value : 0.75 * mean + 0.25 * value;
    return /** @type {import("../chart.js").Point} */ ([at, mean]);
  });
  return [
    { name: "mean reward", points, faint: true, shade: 0 },
    { name: "moving average", points: moving, shade: 0 },
  ];
}

/** Format the labels of a time axis: times within one day, otherwise dates and times. @param {number} first @param {number} last */
function timeText(first, last) {
  const two = (/** @type {number} */ n) => String(n).padStart(2, "0");
  return (/** @type {number} */ time) => {
    const date = new Date(time * 1000);
    const hour = `${two(date.getHours())}:${two(date.getMinutes())}`;
    if (last - first < 120) return `${hour}:${two(date.getSeconds())}`;
    return last - first < 86400 ? hour : `${date.getMonth() + 1}/${date.getDate()} ${hour}`;
  };
}
