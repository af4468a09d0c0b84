/** Details of a rollout: stages, outcome, logs, settings, and host-tool calls. */

import { el, fill } from "../dom.js";
import { count, duration, plural, when } from "../format.js";
import { classBadge } from "../status.js";
import { block } from "../text.js";

/** @typedef {import("../api.js").Json} Json */

export class Details {
  /** @param {import("../record.js").Record} record */
  constructor(record) {
    this.record = record;
    this.element = el("div.details");
    /** @type {import("../keys.js").Binding[]} */
    this.keys = [];
  }

  async show() {
    await this.update();
  }

  async update() {
    const { detail } = this.record;
    const row = detail.rollout;
    fill(
      this.element,
      detail.error && section("Error", trouble(detail.error)),
      section("Stages", stages(detail.stages)),
      section(
        "Rollout",
        pairs([
          ["id", row.id],
          ["name", row.name],
          ["task", row.task],
          ["group", row.group],
          ["agent", `${row.agent ?? ""} ${row.agent_version ?? ""}`],
          ["model", row.model],
          ["mode", row.mode],
          ["sandbox", row.sandbox],
          ["attempt", row.attempt],
          ["not counted", row.excluded],
          ["stop reason", row.stop],
          ["message", row.message],
        ]),
      ),
      detail.outcome &&
        section(
          "Outcome",
          pairs([
            ["class", detail.outcome.kind],
            ["reward", detail.outcome.reward],
            ["resolved", detail.outcome.resolved],
            ["message", detail.outcome.message],
          ]),
          detail.outcome.data && block(JSON.stringify(detail.outcome.data, null, 2), "pre.log"),
        ),
      ...Object.entries(detail.logs ?? {}).map(([name, text]) =>
        section(`Log: ${name}`, text ? block(String(text), "pre.log", 16000) : el("p.muted", { text: "(empty)" })),
      ),
      detail.host_tools?.length > 0 && section("Host tools", ...detail.host_tools.map(hostTool)),
      detail.config && section("Settings", block(JSON.stringify(detail.config, null, 2), "pre.log")),
      detail.totals &&
        section(
          "Trace",
          pairs([
            ["nodes", count(detail.totals.nodes)],
            ["tokens", count(detail.totals.tokens)],
            ["sampled", count(detail.totals.sampled_tokens)],
            ["trained", count(detail.totals.trained_tokens)],
            ["prompt tokens cached", cacheRate(detail.totals)],
            ["training rows", count(detail.totals.rows)],
          ]),
        ),
    );
  }

  leave() {}
}

/** @param {string} title @param {...any} content */
function section(title, ...content) {
  return el(
    "section.panel",
    null,
    el("div.panel-head", null, el("h2", { text: title })),
    el("div.panel-body", null, ...content),
  );
}

/** @param {[string, any][]} known empty values are omitted */
function pairs(known) {
  const filled = known.filter(([, value]) => value !== null && value !== undefined && String(value).trim() !== "");
  return el(
    "dl.pairs",
    null,
    ...filled.flatMap(([name, value]) => [el("dt", { text: name }), el("dd", { text: String(value) })]),
  );
}

/** Return how many prompt tokens the engine had cached, or null if it did not report this. @param {Json} totals */
function cacheRate(totals) {
  if (totals.cache_rate == null) return null;
  return `${count(totals.cached_tokens)} (${Math.round(100 * totals.cache_rate)} %)`;
}

/** @param {Json} error */
function trouble(error) {
  return [
    el(
      "p",
      null,
      classBadge(error.class || "error"),
      ` ${[error.boundary, error.stage].filter(Boolean).join(", in stage ")}`,
    ),
    block(error.message ?? "", "pre.log"),
  ];
}

/** Show each stage with a bar for its duration. @param {Json[]} stages */
function stages(stages) {
  if (!stages?.length) {
    return el("p.muted", { text: "No stages: the session was opened without a runner, or its events were deleted." });
  }
  const longest = Math.max(...stages.map((stage) => stage.seconds ?? 0), 0.001);
  const cells = stages.flatMap((stage) => {
    const bar = el("span");
    bar.style.width = `${((stage.seconds ?? 0) / longest) * 100}%`;
    return [
      el("dt", null, stage.stage),
      el("dd.bar-track", { "aria-hidden": "true" }, bar),
      el("dd", null, stage.seconds === null ? ["since ", when(stage.at)] : duration(stage.seconds)),
    ];
  });
  return el("dl.bars", { "aria-label": plural(stages.length, "stage") }, ...cells);
}

/** @param {Json} call */
function hostTool(call) {
  return el(
    "details.fold",
    null,
    el("summary", null, el("span.fold-kind.is-call", { text: call.tool }), when(call.at)),
    block(JSON.stringify({ arguments: call.arguments, reply: call.reply }, null, 2), "pre.log"),
  );
}
