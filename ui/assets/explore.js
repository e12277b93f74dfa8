// The Explore page. Its controls are in the page; each part is asked of the server, which answers with HTML or a figure.
// A part keeps what it shows until its new answer is there, and an answer to an older question is let go.
(() => {
  "use strict";
  const VF = window.VF;
  const WAIT = 300; // milliseconds after the last key
  const OF_MACHINE = ["map", "lengths", "programs"];
  const OF_MODEL = ["map", "lengths", "programs", "cards", "cost"];
  const COLOURS = { planned: "--vf-line-1", smallest: "--vf-line-3" };

  const layout = (x, y) => {
    const grid = VF.css("--vf-grid");
    const axis = { gridcolor: grid, zeroline: false, linecolor: grid, tickfont: { size: 11 }, automargin: true };
    return {
      margin: { l: 8, r: 10, t: 6, b: 30 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: VF.css("--vf-font") || "system-ui", color: VF.css("--vf-muted"), size: 11 },
      xaxis: { ...axis, title: { text: x, standoff: 4, font: { size: 11 } } },
      yaxis: { ...axis, rangemode: "tozero", nticks: 6, title: { text: y, standoff: 4, font: { size: 11 } } },
      hoverlabel: { bgcolor: VF.css("--vf-surface"), font: { color: VF.css("--vf-ink") }, align: "left" },
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 11 }, bgcolor: "rgba(0,0,0,0)" },
      dragmode: false,
    };
  };

  // Bytes alive, operation by operation: what Check precisely saw.
  VF.timeline = (place, figure) => {
    const base = layout(figure.title, figure.unit);
    return VF.plot(place, [{
      type: "scatter", mode: "lines", x: figure.x, y: figure.y, text: figure.text,
      hovertemplate: `%{y:.2f} ${figure.unit}, %{text}<extra></extra>`,
      line: { color: VF.css("--vf-line-1"), width: 1.3 }, fill: "tozeroy", fillcolor: `${VF.css("--vf-line-1")}22`,
    }], { ...base, height: 160, showlegend: false, xaxis: { ...base.xaxis, nticks: 5, tickformat: ",d" }, yaxis: { ...base.yaxis, nticks: 4 } });
  };

  const wrapped = (text) => text.replaceAll(/(.{40,60}?) /g, "$1<br>");
  const curve = (place, figure) => {
    const lines = figure.lines.map((line) => ({
      type: "scatter", mode: "lines+markers", name: line.name, x: line.x, y: line.y, text: line.text.map(wrapped),
      hovertemplate: "%{text}<extra></extra>", marker: { size: 6 },
      line: { color: VF.css(COLOURS[line.colour]), width: 2 },
    }));
    const ends = [figure.lengths[0], figure.lengths.at(-1)];
    lines.push({
      type: "scatter", mode: "lines", name: figure.budget_name, x: ends, y: [figure.budget, figure.budget],
      hovertemplate: `${figure.budget.toFixed(1)} GiB<extra>${figure.budget_name}</extra>`,
      line: { color: VF.css("--vf-muted"), width: 1.5, dash: "dash" },
    });
    const base = layout(figure.x, "GiB");
    const ticks = { type: "log", tickvals: figure.lengths, ticktext: figure.lengths.map((length) => (length >= 1024 ? `${length / 1024}K` : length)) };
    return VF.plot(place, lines, { ...base, height: matchMedia("(min-width: 1000px)").matches ? 420 : 300, xaxis: { ...base.xaxis, ...ticks } });
  };

  VF.mountExplore = (element) => {
    const root = element.querySelector(".vf-explore");
    const asked = {};
    const figures = {};
    let due = new Set(OF_MODEL);
    let timer = 0;
    const query = () => Object.fromEntries([...root.querySelectorAll("[name]")].map((field) => [field.name, field.value]));
    const boxOf = (part) => root.querySelector(`[data-part="${part}"]`);

    const put = (part, answer) => {
      const body = boxOf(part).querySelector(".vf-part-body");
      figures[part] = answer.figure;
      if (answer.figure) {
        if (!body.querySelector(".vf-plot")) body.replaceChildren(VF.make("div", { class: "vf-plot" }));
        curve(body.firstChild, answer.figure);
      } else body.innerHTML = answer.html;
      if (part === "map") VF.text(root.querySelector(".vf-said"), root.querySelector("[data-chosen] button")?.title ?? "");
      for (const [side, usual] of Object.entries(answer.usual ?? {})) {
        for (const [name, value] of Object.entries(usual)) root.querySelector(`[name=${side}_${name}]`).placeholder = value;
      }
    };
    const ask = async (part) => {
      const mine = (asked[part] = (asked[part] ?? 0) + 1);
      const box = boxOf(part);
      box.classList.add("vf-part-waits");
      let answer;
      try {
        answer = await VF.fetch(`explore/${part}`, query());
      } catch (error) {
        const said = error.what ? `${error.what}. ${error.remedy ?? ""}` : VF.word("monitor.offline");
        answer = { html: VF.make("p", { class: "vf-note" }, said).outerHTML };
      }
      if (mine !== asked[part]) return;
      put(part, answer);
      box.classList.remove("vf-part-waits");
      box.dataset.answered = mine;
    };
    // The map comes first, then the rest: the server works on one at a time.
    const refresh = async () => {
      if (VF.place().page !== "explore") return;
      const parts = OF_MODEL.filter((part) => due.has(part));
      due = new Set();
      for (const part of parts) await ask(part);
    };
    const want = (parts, wait) => {
      for (const part of parts) due.add(part);
      clearTimeout(timer);
      timer = setTimeout(refresh, wait);
    };
    const partsOf = (name) => {
      if (["card", "count", "ram"].includes(name)) return name === "ram" ? [...OF_MACHINE, "cards"] : OF_MACHINE;
      return ["length", "model", "method"].includes(name) ? OF_MODEL : ["cost"];
    };

    root.addEventListener("input", (event) => {
      event.stopPropagation();
      if (event.target.matches("input[name]:not([name=model])")) want(partsOf(event.target.name), WAIT);
    });
    root.addEventListener("change", (event) => {
      event.stopPropagation();
      const { name } = event.target;
      if (/^[ab]_card$/.test(name)) for (const key of ["price", "rent", "watts"]) root.querySelector(`[name=${name[0]}_${key}]`).value = "";
      if (name === "card") root.querySelector("[name=count]").disabled = !event.target.value.startsWith("plan:");
      if (name) want(partsOf(name), 0);
    });
    root.addEventListener("click", (event) => {
      const cell = event.target.closest("[data-model]");
      if (cell) {
        root.querySelector("[name=model]").value = cell.dataset.model;
        root.querySelector("[name=method]").value = cell.dataset.method;
        want(OF_MODEL, 0);
      }
      if (event.target.closest("[data-calibrate]")) calibrate("POST");
    });
    window.addEventListener("vf:arrive", () => want([], 0));
    window.addEventListener("vf:theme", () => {
      if (figures.lengths) curve(boxOf("lengths").querySelector(".vf-plot"), figures.lengths);
    });

    // ---- measuring this machine
    const button = root.querySelector("[data-calibrate]");
    const view = root.querySelector(".vf-calibrate-view");
    const calibrate = async (method) => {
      button.disabled = true;
      let found;
      try {
        found = await VF.fetch("calibration", {}, method);
      } catch (error) {
        const said = error.what ? `${error.what}. ${error.remedy ?? ""}` : VF.word("monitor.offline");
        found = { state: "failed", html: VF.make("p", { class: "vf-note" }, said).outerHTML };
      }
      view.innerHTML = found.html;
      view.dataset.state = found.state;
      button.disabled = found.state === "running";
      if (found.state === "running") setTimeout(() => calibrate("GET"), 400);
      else if (found.state === "done" && method === "GET") {
        want(OF_MACHINE, 0);
        VF.askEstimate?.();
        VF.askPresets?.();
      }
    };
    root.querySelector("[name=count]").disabled = true; // this machine has the cards it has
    want([], 0);
  };
})();
