/**
 * Throttled loading: one load at a time, with a pause in between, and once more if something changed during a load. Live views use it.
 */

export class Paced {
  /**
   * @param {() => Promise<any>} load says itself what went wrong
   * @param {number} apart milliseconds that changes are gathered for
   */
  constructor(load, apart) {
    this.load = load;
    this.apart = apart;
    this.timer = 0;
    this.loading = false;
    this.left = false;
    /** @type {"" | "soon" | "now"} what was asked for during a load */
    this.again = "";
  }

  /** Something has changed. */
  soon() {
    if (this.loading) this.again ||= "soon";
    else if (!this.left) this.timer ||= setTimeout(() => this.now(), this.apart);
  }

  /** Somebody waits for it. */
  async now() {
    if (this.loading) this.again = "now";
    if (this.loading || this.left) return;
    clearTimeout(this.timer);
    this.timer = 0;
    this.loading = true;
    try {
      await this.load();
    } finally {
      this.loading = false;
      const { again } = this;
      this.again = "";
      if (again === "now") this.now();
      else if (again) this.soon();
    }
  }

  /** Nobody looks any more: nothing is loaded from now on. */
  leave() {
    this.left = true;
    clearTimeout(this.timer);
  }
}
