/**
 * The page's live connection. It starts at the cursor of the loaded lists, reconnects from the last cursor received, and shows its state in
 * the bar.
 */

import * as api from "./api.js";

const FIRST_MS = 500;
const LONGEST_MS = 15000;

/**
 * @typedef {{rollouts: api.Json[], gone: string[], reload: boolean, gateway: api.Json | null}} Changes `reload` means that
 *   there are more changes than listed
 */

export class Live {
  /**
   * @param {(changes: Changes) => void} onChanges
   * @param {(state: "live" | "lost" | "waiting", seconds: number) => void} onState
   */
  constructor(onChanges, onState) {
    this.onChanges = onChanges;
    this.onState = onState;
    this.cursor = 0;
    this.failures = 0;
    /** @type {EventSource | null} */
    this.source = null;
    this.timer = 0;
    this.asking = false; // whether the login is being checked; meanwhile, no other attempt is made
    this.age = 0; // increased to discard pending replies
  }

  /** @param {number} cursor the last cursor of the loaded lists */
  start(cursor) {
    this.stop();
    this.cursor = cursor;
    this.#connect();
  }

  stop() {
    this.age += 1;
    this.asking = false;
    this.failures = 0;
    clearTimeout(this.timer);
    this.source?.close();
    this.source = null;
  }

  /** If the connection is lost, reconnect immediately. */
  now() {
    if (this.failures) this.#again();
  }

  #connect() {
    const source = new EventSource(api.changes(this.cursor));
    this.source = source;
    source.addEventListener("open", () => {
      this.failures = 0;
      this.onState("live", 0);
    });
    source.addEventListener("changed", (event) => this.#changed(JSON.parse(event.data)));
    source.addEventListener("reload", (event) => {
      this.cursor = JSON.parse(event.data).cursor;
      this.onChanges({ rollouts: [], gone: [], reload: true, gateway: null });
    });
    source.addEventListener("error", () => this.#lost(source));
  }

  /** @param {api.Json} data */
  #changed(data) {
    this.cursor = data.cursor;
    this.onChanges({ rollouts: data.rollouts, gone: data.gone, reload: data.more, gateway: data.gateway ?? null });
  }

  /** @param {EventSource} source */
  #lost(source) {
    source.close();
    if (this.source !== source) return; // an abandoned connection
    this.source = null;
    this.#wait();
  }

  #wait() {
    this.failures += 1;
    const wait = Math.min(LONGEST_MS, FIRST_MS * 2 ** (this.failures - 1));
    this.onState("lost", wait / 1000);
    this.timer = setTimeout(() => this.#again(), wait);
  }

  async #again() {
    if (this.source || this.asking) return;
    clearTimeout(this.timer);
    const { age } = this;
    this.asking = true;
    try {
      await api.me(); // detects an expired login
    } catch (error) {
      if (!(error instanceof api.Refused)) throw error;
      if (age === this.age && error.status !== 401) this.#wait();
      return;
    } finally {
      if (age === this.age) this.asking = false;
    }
    if (age === this.age) this.#connect();
  }
}
