/** What trainers reported about log-probabilities: alarms, and histograms of the differences from the engine's log-probabilities. */

import { chart } from "./chart.js";
import { el } from "./dom.js";
import { count, number } from "./format.js";

/** @typedef {import("./api.js").Json} Json */

/** Show the alarms of each feed's newest report. @param {Json} mismatch */
export function alarms(mismatch) {
  return mismatch.newest.flatMap((/** @type {Json} */ report) =>
    report.alarms.map((/** @type {Json} */ alarm) =>
      el(
        "p.banner.is-bad",
        { role: "alert" },
        el("strong", { text: `Alarm (${report.feed}, delivery ${report.number}): ` }),
        alarm.message,
      ),
    ),
  );
}

/** @param {Json} mismatch */
export function mismatchCharts(mismatch) {
  const several = mismatch.newest.length > 1;
  return [
    ...mismatch.newest.flatMap((/** @type {Json} */ report) => {
      const of = several ? ` (${report.feed})` : "";
      return [differences(mismatch.edges, report, of), ratios(mismatch.edges, report, of)];
    }),
    trend(
      mismatch.trend,
      mismatch.newest.map((/** @type {Json} */ report) => report.feed),
    ),
  ];
}

/** @param {number[]} edges @param {Json} report @param {string} of */
function differences(edges, report, of) {
  const same = report.lags.find((/** @type {Json} */ one) => one.lag === 0);
  return chart({
    title: `Log-probabilities: trainer − engine, same weights${of}`,
    x: "nats, up to",
    whole: true,
    xText: (place) => label(edges, place, (edge) => edge),
    y: "tokens",
    yText: count,
    series: same ? [{ name: "tokens", kind: "bars", points: points(same.counts), shade: 0 }] : [],
    empty: "All tokens of the last update were sampled with older or unknown weights.",
  });
}

/** @param {number[]} edges @param {Json} report @param {string} of */
function ratios(edges, report, of) {
  const named = (/** @type {Json} */ one) =>
    one.lag === null ? "unknown version" : one.lag === 1 ? "1 version behind" : `${one.lag} versions behind`;
  return chart({
    title: `Importance ratios by version lag${of}`,
    x: "ratio, up to",
    whole: true,
    xText: (place) => label(edges, place, Math.exp),
    y: "share of tokens",
    series: report.lags.map((/** @type {Json} */ one, /** @type {number} */ i) => ({
      name: named(one),
      points: points(one.counts).map(([at, tokens]) => [at, tokens / one.tokens]),
      shade: i % 4,
    })),
  });
}

/** @param {Json[]} reports @param {string[]} feeds */
function trend(reports, feeds) {
  const series = feeds.flatMap((feed, i) => {
    const own = reports.filter((one) => one.feed === feed);
    const of = feeds.length > 1 ? ` (${feed})` : "";
    return [
      { name: `mean difference${of}`, points: own.map((one) => [one.number, one.mean]), shade: (2 * i) % 4 },
      { name: `KL (k3)${of}`, points: own.map((one) => [one.number, one.k3]), shade: (2 * i + 1) % 4 },
    ];
  });
  return chart({
    title: "Mismatch by update, same weights",
    x: "delivery",
    whole: true,
    y: "nats per token",
    series,
    empty: "All tokens were sampled with older or unknown weights.",
  });
}

/** @param {number[]} counts @returns {[number, number][]} */
function points(counts) {
  return counts.map((tokens, place) => [place, tokens]);
}

/**
 * Return the label of a bucket: its upper edge or, for the last bucket, `>` and its lower edge.
 * @param {number[]} edges @param {number} place @param {(edge: number) => number} convert
 */
function label(edges, place, convert) {
  if (!Number.isInteger(place) || place < 0 || place > edges.length) return "";
  return place === edges.length
    ? `> ${number(convert(edges[place - 1]))}`
    : number(Number(convert(edges[place]).toPrecision(3)));
}
