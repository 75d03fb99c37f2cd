//! Draws the state of the folder sync.

use ratatui::{Frame, layout::Rect, text::Line, widgets::Paragraph};

use super::{FAINT, WARN, block};
use crate::tui::{app_state::AppState, layout::Pane, sync_status::SyncState};

pub fn draw(frame: &mut Frame, state: &AppState, area: Rect) {
    let block = block(state, Pane::Sync, " sync ");
    let inner = block.inner(area);
    frame.render_widget(block, area);
    let mut lines = vec![Line::from(state.sync.summary())];
    match &state.sync {
        SyncState::None => {
            let sandbox = state.opened_sandbox().map_or("NAME", |info| info.name.as_deref().unwrap_or(&info.sandbox));
            lines.push(Line::styled("To sync a local folder with /workspace, run there in another terminal:", FAINT));
            lines.push(Line::raw(format!("  cobox sync --sandbox {}", cobox_langgraph::clean(sandbox, 100))));
        }
        SyncState::Running { details, conflicts, .. } => {
            let style = if *conflicts > 0 { WARN } else { FAINT };
            lines.extend(details.iter().map(|line| Line::styled(cobox_langgraph::clean(line, 400), style)));
        }
    }
    // The view can't be scrolled past its last line at the bottom.
    let max_scroll = lines.len().saturating_sub(usize::from(inner.height));
    frame.render_widget(Paragraph::new(lines.split_off(state.sync_scroll.min(max_scroll))), inner);
}
