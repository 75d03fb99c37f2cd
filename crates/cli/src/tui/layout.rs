//! Positions of the panes, by screen size and focus: one rule, used for drawing and for the mouse.

use ratatui::layout::{Constraint, Layout, Rect};

/// Smallest screen that fits the panes.
pub const MIN_SIZE: (u16, u16) = (80, 24);
/// From this size on, panes are side by side.
const WIDE: (u16, u16) = (120, 30);
/// Rows of the events strip below a single pane, including its border.
const STRIP_ROWS: u16 = 5;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pane {
    Chat,
    Terminal,
    Events,
    Files,
    Sync,
}

impl Pane {
    pub const ALL: [Pane; 5] = [Pane::Chat, Pane::Terminal, Pane::Events, Pane::Files, Pane::Sync];

    pub fn title(self) -> &'static str {
        match self {
            Pane::Chat => "chat",
            Pane::Terminal => "terminal",
            Pane::Events => "events",
            Pane::Files => "files",
            Pane::Sync => "sync",
        }
    }

    pub fn next(self, delta: isize) -> Self {
        let at = Self::ALL.iter().position(|p| *p == self).unwrap_or(0) as isize;
        Self::ALL[(at + delta).rem_euclid(Self::ALL.len() as isize) as usize]
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScreenLayout {
    pub header: Rect,
    /// Area of the pane names, if only one pane is shown.
    pub tabs: Option<Rect>,
    pub panes: Vec<(Pane, Rect)>,
    pub footer: Rect,
}

impl ScreenLayout {
    /// `None` if the screen is too small. `side` is the pane in the lower corner of a wide screen.
    pub fn compute((cols, rows): (u16, u16), focus: Pane, side: Pane) -> Option<Self> {
        if cols < MIN_SIZE.0 || rows < MIN_SIZE.1 {
            return None;
        }
        let whole = Rect::new(0, 0, cols, rows);
        if cols >= WIDE.0 && rows >= WIDE.1 {
            let [header, middle, footer] =
                Layout::vertical([Constraint::Length(1), Constraint::Min(0), Constraint::Length(1)]).areas(whole);
            let [left, right] = Layout::horizontal([Constraint::Percentage(50), Constraint::Percentage(50)]).areas(middle);
            let [top, bottom] = Layout::vertical([Constraint::Percentage(60), Constraint::Percentage(40)]).areas(right);
            return Some(Self { header, tabs: None, panes: vec![(Pane::Chat, left), (Pane::Terminal, top), (side, bottom)], footer });
        }
        let strip = if focus == Pane::Events { 0 } else { STRIP_ROWS };
        let rows = [Constraint::Length(1), Constraint::Length(1), Constraint::Min(0), Constraint::Length(strip), Constraint::Length(1)];
        let [header, tabs, main, strip, footer] = Layout::vertical(rows).areas(whole);
        let mut panes = vec![(focus, main)];
        if focus != Pane::Events {
            panes.push((Pane::Events, strip));
        }
        Some(Self { header, tabs: Some(tabs), panes, footer })
    }

    pub fn pane(&self, pane: Pane) -> Option<Rect> {
        self.panes.iter().find(|(p, _)| *p == pane).map(|(_, rect)| *rect)
    }

    /// The pane at this point.
    pub fn pane_at(&self, col: u16, row: u16) -> Option<(Pane, Rect)> {
        self.panes.iter().find(|(_, rect)| rect.contains((col, row).into())).copied()
    }

    /// The tab at this point, as drawn from [`tab_spans`].
    pub fn tab_at(&self, col: u16, row: u16) -> Option<Pane> {
        let tabs = self.tabs.filter(|tabs| tabs.contains((col, row).into()))?;
        tab_spans().into_iter().find(|(_, from, to)| (*from..*to).contains(&(col - tabs.x))).map(|(pane, ..)| pane)
    }
}

/// The first column and the end column of each tab: ` 1 chat `.
pub fn tab_spans() -> Vec<(Pane, u16, u16)> {
    let mut from = 0;
    Pane::ALL
        .into_iter()
        .map(|pane| {
            let to = from + pane.title().len() as u16 + 4;
            let span = (pane, from, to);
            from = to;
            span
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panes_fill_the_screen_without_overlap() {
        for cols in [80, 100, 119, 120, 200] {
            for rows in [24, 29, 30, 60] {
                for focus in Pane::ALL {
                    let layout = ScreenLayout::compute((cols, rows), focus, Pane::Files).unwrap();
                    let mut all: Vec<Rect> = layout.panes.iter().map(|(_, r)| *r).chain([layout.header, layout.footer]).collect();
                    all.extend(layout.tabs);
                    let area: u32 = all.iter().map(|r| r.area()).sum();
                    assert_eq!(area, u32::from(cols) * u32::from(rows), "{cols}×{rows} {focus:?}");
                }
            }
        }
        assert_eq!(ScreenLayout::compute((79, 24), Pane::Chat, Pane::Events), None);
        assert_eq!(ScreenLayout::compute((80, 23), Pane::Chat, Pane::Events), None);
    }

    #[test]
    fn a_tab_is_where_it_is_drawn() {
        let layout = ScreenLayout::compute((80, 24), Pane::Chat, Pane::Events).unwrap();
        assert_eq!(layout.tab_at(1, 1), Some(Pane::Chat));
        assert_eq!(layout.tab_at(9, 1), Some(Pane::Terminal));
        assert_eq!(layout.tab_at(79, 1), None);
        assert_eq!(Pane::Chat.next(-1), Pane::Sync);
    }
}
