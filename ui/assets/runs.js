// The Runs page: a row a run; what is at work first, then the queue in its order, then the newest. A click opens a run in
// Monitor. A waiting run has a second line with what can be done about its place.
(() => {
  "use strict";
  const VF = window.VF;

  VF.mountRuns = (element, trigger) => {
    const root = element.querySelector(".vf-runs");
    const rows = new Map();
    let timer = 0;
    let isHeld = false;

    const table = VF.make("div", { class: "vf-table", role: "table" });
    const empty = VF.make("p", { class: "vf-empty", hidden: true }, VF.word("runs.empty"));
    const notice = VF.make("p", { class: "vf-offline", hidden: true });
    const names = ["run", "state", "model", "progress", "duration", "loss", "when"];
    table.append(
      VF.make("div", { class: "vf-row vf-row-head", role: "row" },
        ...names.map((name) => VF.make("span", { role: "columnheader" }, VF.word(`runs.${name}`))), VF.make("span")),
    );
    const button = (act, text, ...more) =>
      VF.make("button", { class: ["vf-button vf-button-small", ...more].join(" "), type: "button", "data-act": act }, text);
    const hold = button("hold", "");
    const heldNote = VF.make("span", { class: "vf-held" });
    const places = VF.make("span", { class: "vf-sub", "data-part": "devices" });
    const bar = VF.make("div", { class: "vf-queue-bar", hidden: true }, hold, heldNote, places);
    root.append(notice, empty, bar, table);

    // A pressed button waits for the next answer: a double click is one.
    const send = (pressed, values) => {
      pressed.disabled = true;
      trigger("click", values);
      setTimeout(tick, 300);
    };
    hold.addEventListener("click", () => send(hold, { action: isHeld ? "release" : "hold", run: 0 }));

    const makeRow = (job) => {
      const cells = Object.fromEntries(names.map((name) => [name, VF.make("span", { class: `vf-cell vf-cell-${name}`, role: "cell", "data-label": VF.word(`runs.${name}`) })]));
      const link = VF.make("a", { href: `?view=monitor&run=${job.id}` });
      const badge = VF.make("span", { class: "vf-badge" });
      const buttons = {
        stop: button("stop", VF.word("runs.cancel")),
        again: button("duplicate", VF.word("runs.duplicate")),
        up: button("up", VF.word("runs.up")),
        down: button("down", VF.word("runs.down")),
        edit: button("edit", VF.word("runs.edit")),
        duplicate: button("duplicate", VF.word("runs.duplicate")),
      };
      const after = VF.make("select", { "data-act": "after" });
      const anyway = VF.make("input", { type: "checkbox", "data-act": "anyway" });
      const anywayLabel = VF.make("label", {}, anyway, VF.word("runs.after.anyway"));
      const waits = VF.make("span", { class: "vf-row-waits-for", hidden: true });
      const queue = VF.make("div", { class: "vf-row-queue", hidden: true }, waits, buttons.up, buttons.down, buttons.edit, buttons.duplicate,
        VF.make("label", {}, VF.word("runs.after"), after), anywayLabel);
      cells.run.append(link);
      cells.state.append(badge);
      const row = VF.make("div", { class: "vf-row", role: "row", "data-run": job.id }, ...Object.values(cells),
        VF.make("span", { class: "vf-cell-act" }, buttons.stop, buttons.again), queue);
      row.addEventListener("click", (event) => {
        const pressed = event.target.closest("button");
        if (pressed) return send(pressed, { action: pressed.dataset.act, run: job.id });
        if (event.target.closest(".vf-row-queue")) return;
        event.preventDefault();
        VF.go("monitor", job.id);
      });
      const wait = (event) => {
        event.stopPropagation();
        send(event.target, { action: "after", run: job.id, after: Number(after.value), anyway: anyway.checked });
      };
      after.addEventListener("change", wait);
      anyway.addEventListener("change", wait);
      return { row, cells, link, badge, buttons, queue, after, anyway, anywayLabel, waits, choices: "" };
    };

    // What a waiting run may come after: everything that is not over, and what it comes after already.
    const drawAfter = (made, job, runs) => {
      if (document.activeElement === made.after && !made.after.disabled) return; // someone is choosing
      const found = runs.filter((other) => other.id !== job.id && other.after !== job.id && (!other.final || other.state === "paused" || other.id === job.after));
      if (job.after && !found.some((other) => other.id === job.after)) found.push({ id: job.after, name: "" });
      const choices = JSON.stringify(found.map((other) => [other.id, other.name]));
      if (made.choices !== choices) {
        made.choices = choices;
        made.after.replaceChildren(VF.make("option", { value: 0 }, VF.word("runs.after.none")),
          ...found.sort((a, b) => a.id - b.id).map((other) => VF.make("option", { value: other.id }, `${other.id}  ${other.name}`)));
      }
      made.after.value = String(job.after ?? 0);
      made.anyway.checked = job.after_anyway;
      made.after.disabled = made.anyway.disabled = false;
      VF.show(made.anywayLabel, job.after != null);
    };

    const drawQueue = (made, job, runs, waiting) => {
      const queued = job.state === "queued";
      VF.show(made.queue, queued);
      VF.show(made.buttons.stop, queued);
      VF.show(made.buttons.again, !queued);
      for (const each of Object.values(made.buttons)) each.disabled = false;
      if (!queued) return;
      made.buttons.up.disabled = job.place === 1;
      made.buttons.down.disabled = job.place === waiting;
      VF.show(made.buttons.edit, job.changeable);
      VF.text(made.waits, job.waits);
      VF.show(made.waits, job.blocked);
      drawAfter(made, job, runs);
    };

    const draw = ({ runs, time, held, silent, unheard, devices }) => {
      VF.show(empty, runs.length === 0);
      VF.show(table, runs.length > 0);
      VF.show(bar, runs.length > 0);
      isHeld = !!held; // the reason, or nothing
      hold.disabled = false;
      VF.text(hold, VF.word(held ? "runs.release" : "runs.hold"));
      VF.text(heldNote, [unheard, held, silent].filter(Boolean).join(" "));
      VF.text(places, devices.join(" · "));
      const known = new Set(runs.map((job) => job.id));
      for (const [id, made] of rows) if (!known.has(id)) { made.row.remove(); rows.delete(id); }
      const waiting = runs.filter((job) => job.state === "queued").length;
      runs.forEach((job, index) => {
        if (!rows.has(job.id)) rows.set(job.id, makeRow(job));
        const made = rows.get(job.id);
        const there = table.children[index + 1];
        if (there !== made.row) table.insertBefore(made.row, there ?? null);
        const { cells, link, badge } = made;
        VF.text(link, `${job.id}  ${job.name}`);
        VF.text(badge, VF.word(`state.${job.state}`));
        badge.className = `vf-badge vf-state-${job.state}`;
        VF.text(cells.model, `${job.model} · ${job.method}`);
        VF.text(cells.progress, job.total_steps ? `${VF.count(job.step)} / ${VF.count(job.total_steps)}` : VF.count(job.step));
        VF.text(cells.duration, VF.duration(VF.runTime(job, time)));
        VF.text(cells.loss, VF.loss(job.final_loss));
        VF.text(cells.when, new Date((job.started_at ?? job.created_at) * 1000).toLocaleString(VF.language, { dateStyle: "short", timeStyle: "short" }));
        drawQueue(made, job, runs, waiting);
      });
    };

    const tick = async () => {
      clearTimeout(timer);
      if (VF.place().page === "runs" && !document.hidden) {
        try {
          draw(await VF.fetch("runs"));
          VF.show(notice, false);
        } catch (error) {
          VF.text(notice, error.what ? `${error.what}. ${error.remedy ?? ""}` : VF.word("monitor.offline"));
          VF.show(notice, true);
        }
        clearTimeout(timer);
        timer = setTimeout(tick, 1500);
      }
    };
    window.addEventListener("vf:arrive", tick);
    document.addEventListener("visibilitychange", tick);
    tick();
  };
})();
