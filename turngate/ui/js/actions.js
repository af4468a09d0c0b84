/** Actions on a rollout: cancel, seal, retry, export. All except export ask for confirmation and report the result. */

import * as api from "./api.js";
import * as dialog from "./dialog.js";
import { el } from "./dom.js";
import { say } from "./notice.js";
import { nameOf } from "./status.js";

/** @typedef {import("./api.js").Json} Json */

/** @type {Object<string, [string, string]>} */
const FORMATS = {
  rows: ["Training rows", "JSON lines: ids, mask, log-probabilities, reward; one row per branch"],
  messages: ["Messages", "JSON lines: one conversation per branch in OpenAI's format, with the reward"],
  trace: ["Trace", "JSON: the whole tree, as the admin API returns it"],
};

/**
 * @param {import("./record.js").Record} record
 * @param {() => void} done called after an action
 * @returns {Node[]}
 */
export function actionsOf(record, done) {
  const { can } = record.detail;
  const made = [];
  if (can.cancel) made.push(button("Cancel", () => cancel(record, done), "is-danger"));
  if (can.seal) made.push(button("Seal", () => seal(record, done)));
  const retry = button("Retry", () => again(record, done));
  if (!can.retry?.ok) {
    retry.setAttribute("disabled", "");
    retry.title = `Cannot be retried: ${can.retry?.why ?? "unknown reason"}`;
  }
  made.push(retry);
  if (can.export?.length) made.push(button("Export", () => exportOf(record)));
  return made;
}

/** @param {string} text @param {() => void} run @param {string} [look] */
function button(text, run, look = "") {
  return el("button.button", { type: "button", class: look, text, on: { click: run } });
}

/** @param {string} id @param {"cancel" | "seal" | "retry"} verb @param {(got: Json) => string} words @param {() => void} done */
async function act(id, verb, words, done) {
  try {
    say(words(await api.act(id, verb)));
  } catch (error) {
    if (!(error instanceof api.Refused)) throw error;
    say(error.message, "bad");
  }
  done();
}

/** @param {import("./record.js").Record} record @param {() => void} done */
export async function cancel(record, done) {
  const text = `This ends ${nameOf(record.row)}. Generation stops, and the agent receives no more replies. Everything recorded is kept.`;
  if (await dialog.confirm("Cancel this rollout?", text, "Cancel the rollout", true))
    await act(record.id, "cancel", () => "The rollout was cancelled.", done);
}

/** @param {import("./record.js").Record} record @param {() => void} done */
async function seal(record, done) {
  const text = `This ends the session of ${nameOf(record.row)}. The agent receives no more replies. Its turns so far can be trained on.`;
  if (await dialog.confirm("Seal this rollout?", text, "Seal the session"))
    await act(record.id, "seal", () => "The session was sealed.", done);
}

/** @param {import("./record.js").Record} record @param {() => void} done */
async function again(record, done) {
  const text =
    `This asks the batch for another attempt at ${nameOf(record.row)}, with its own session and sandbox. ` +
    "The current attempt is kept.";
  if (await dialog.confirm("Retry this rollout?", text, "Retry the rollout"))
    await act(record.id, "retry", (got) => got.message, done);
}

/** @param {import("./record.js").Record} record */
export function exportOf(record) {
  menu(record.detail.can.export.map((/** @type {string} */ format) => [format, api.exportOf(record.id, format)]));
}

/** @param {string} group */
export function exportOfGroup(group) {
  menu(["rows", "messages"].map((format) => [format, api.exportOfGroup(group, format)]));
}

/** @param {[string, string][]} links format and address */
function menu(links) {
  const entry = ([format, address] = ["", ""]) => {
    const [title, text] = FORMATS[format] ?? [format, ""];
    return el("a", { href: address, download: "" }, el("strong", { text: title }), el("small", { text }));
  };
  const shown = dialog.open("Export", [el("div.menu", null, ...links.map(entry))]);
  shown.querySelector(".menu")?.addEventListener("click", () => setTimeout(() => shown.close()));
}
