// The Runs page: a row a run, newest first; a click opens it in Monitor.
(() => {
  "use strict";
  const VF = window.VF;

  VF.mountRuns = (element, trigger) => {
    const root = element.querySelector(".vf-runs");
    const rows = new Map();
    let timer = 0;

    const table = VF.make("div", { class: "vf-table", role: "table" });
    const empty = VF.make("p", { class: "vf-empty", hidden: true }, VF.word("runs.empty"));
    const notice = VF.make("p", { class: "vf-offline", hidden: true });
    const names = ["run", "state", "model", "progress", "duration", "loss", "when"];
    table.append(
      VF.make("div", { class: "vf-row vf-row-head", role: "row" },
        ...names.map((name) => VF.make("span", { role: "columnheader" }, VF.word(`runs.${name}`))), VF.make("span")),
    );
    root.append(notice, empty, table);

    const makeRow = (job) => {
      const cells = Object.fromEntries(names.map((name) => [name, VF.make("span", { class: `vf-cell vf-cell-${name}`, role: "cell", "data-label": VF.word(`runs.${name}`) })]));
      const link = VF.make("a", { href: `?view=monitor&run=${job.id}` });
      const badge = VF.make("span", { class: "vf-badge" });
      const cancel = VF.make("button", { class: "vf-button vf-button-small", type: "button" }, VF.word("runs.cancel"));
      cells.run.append(link);
      cells.state.append(badge);
      const row = VF.make("div", { class: "vf-row", role: "row", "data-run": job.id }, ...Object.values(cells), VF.make("span", { class: "vf-cell-act" }, cancel));
      row.addEventListener("click", (event) => {
        event.preventDefault();
        if (event.target !== cancel) VF.go("monitor", job.id);
      });
      cancel.addEventListener("click", () => {
        cancel.disabled = true;
        trigger("click", { action: "stop", run: job.id });
      });
      return { row, cells, link, badge, cancel };
    };

    const draw = ({ runs, time }) => {
      VF.show(empty, runs.length === 0);
      VF.show(table, runs.length > 0);
      const known = new Set(runs.map((job) => job.id));
      for (const [id, made] of rows) if (!known.has(id)) { made.row.remove(); rows.delete(id); }
      for (const job of [...runs].reverse()) {
        if (!rows.has(job.id)) {
          rows.set(job.id, makeRow(job));
          table.children[0].after(rows.get(job.id).row);
        }
        const { cells, link, badge, cancel } = rows.get(job.id);
        VF.text(link, `${job.id}  ${job.name}`);
        VF.text(badge, VF.word(`state.${job.state}`));
        badge.className = `vf-badge vf-state-${job.state}`;
        VF.text(cells.model, `${job.model} · ${job.method}`);
        VF.text(cells.progress, job.total_steps ? `${VF.count(job.step)} / ${VF.count(job.total_steps)}` : VF.count(job.step));
        VF.text(cells.duration, VF.duration(VF.runTime(job, time)));
        VF.text(cells.loss, VF.loss(job.final_loss));
        VF.text(cells.when, new Date((job.started_at ?? job.created_at) * 1000).toLocaleString(VF.language, { dateStyle: "short", timeStyle: "short" }));
        VF.show(cancel, job.state === "queued");
      }
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
